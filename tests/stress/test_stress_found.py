"""What the random problems found, as small as it goes."""

import gzip
import struct

import pytest
import torch

from data_files import write_idx
from opteq import Equilibrium, Status, Stop
from opteq.cells import Monotone, Multiscale, Residual
from opteq.data import load
from opteq.recipes import Recipe, RecipeError
from opteq.solvers import PeacemanRachford
from processes import finish, in_child

pytestmark = [pytest.mark.stress, pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]


@pytest.mark.parametrize("m", [1e-12, 1e-30, 1e-300])
@pytest.mark.parametrize("weight", [-1.0, 1.0, 1e30])
def test_a_monotone_layer_without_weights_and_with_a_small_m_is_solved_or_said_not_to_be(m, weight):
    """W rounds to I: the resolvent was formed as (1 + step) I - step W, which is 0 there, with a step of 1e25."""
    cell = Monotone(3, 2, m=m)
    with torch.no_grad():
        cell.A.zero_()
        cell.B.zero_()
        cell.U.fill_(weight)
    solution = Equilibrium(cell, PeacemanRachford(), Stop(rtol=1e-5), on_failure="ignore").solve(torch.ones(1, 3))
    assert solution.z.isfinite().all()
    assert (solution.status is Status.CONVERGED) == (weight < 0)  # f(z) = relu(z + 3 weight) has a fixed point, 0, or none
    assert weight > 0 or not solution.z.any()


@pytest.mark.parametrize("cell", [Residual(4, 2, groups=2), Multiscale((4, 4), groups=2)], ids=["residual", "multiscale"])
def test_norms_learn_also_behind_fixed_weights_and_with_the_channels_together(cell):
    """PyTorch's backward of a group norm writes to no memory there; in a child, for that ends a process."""
    torch.manual_seed(0)
    for name, parameter in cell.named_parameters():
        parameter.requires_grad_("norm" in name)
    x, layer = torch.randn(3, 4, 4, 2), Equilibrium(cell.double(), on_failure="ignore")
    norms = [parameter for parameter in cell.parameters() if parameter.requires_grad]

    def gradients(memory_format: torch.memory_format) -> list[torch.Tensor]:
        z = layer(x.double().contiguous(memory_format=memory_format))
        return list(torch.autograd.grad(z.square().sum(), norms))

    def both() -> None:
        torch.testing.assert_close(gradients(torch.channels_last), gradients(torch.contiguous_format))

    assert finish(in_child(both)) == 0


@pytest.mark.parametrize("head", [(0x803, 4), (0x803, 4, 0), (0x803, 4, 28), (0x803, 4, 28, 0), (0x803, 4, 0, 0)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_an_idx_file_that_ends_in_its_header_or_has_images_without_pixels_is_refused(tmp_path, packed, head):
    """What was missing of the header was taken for zeros: four images of 0 x 0."""
    write_idx(tmp_path, (6, 4), packed=packed)
    path, content = tmp_path / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}", struct.pack(f">{len(head)}I", *head)
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\S* must begin with 16 bytes: how many items"):
        load("mnist", tmp_path, verify=False)


@pytest.mark.parametrize("change", [{"data": "x" * 5000}, {"train": ["x" * 5000]}, {"x" * 5000: 1}, {"two\nlines": 1}])
def test_an_error_about_a_configuration_is_one_short_line(change):
    """It repeated the whole value."""
    with pytest.raises(RecipeError) as error:
        Recipe.from_json(Recipe().to_json() | change)
    assert len(str(error.value)) < 700
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_peaceman_rachford_refuses_half_precision_and_names_what_fits(dtype):
    layer = Equilibrium(Monotone(3, 2).to(dtype), PeacemanRachford())
    with pytest.raises(TypeError, match=r"half precision has none.*float32 or float64.*Anderson\(\)"):
        layer.solve(torch.ones(1, 3, dtype=dtype))
