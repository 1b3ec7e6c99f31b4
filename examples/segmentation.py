"""Say for each pixel what it shows: an equilibrium network on made pictures of discs and crosses in noise.

The network is an OptEq segmenter: a few convolutions, an equilibrium of three convolutional layers, and scores at each pixel. The
classes are background, disc and cross. Inside, a disc and a cross look the same: it takes the shape to tell them apart. The score
is the mean over the classes of intersection over union (mIoU), on new pictures.

    python examples/segmentation.py            # about 15 s on one core
    python examples/segmentation.py --quick
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.models import count_parameters, opteq_segmenter
from opteq.training import TrainConfig, fit

CLASSES = ("background", "disc", "cross")
SHADES = torch.tensor([ord(c) for c in " o+"], dtype=torch.uint8)


def pictures(count: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [count, 1, side, side] with a disc and a cross each, which may overlap, and their labels [count, side, side]."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    y = torch.zeros(count, side, side, dtype=torch.long)
    for label in (1, 2):
        radius = side * (0.18 + 0.08 * torch.rand(count, 1, 1, generator=generator))
        place = radius + (side - 2 * radius) * torch.rand(2, count, 1, 1, generator=generator)
        down, right = (rows - place[0]).abs(), (columns - place[1]).abs()
        cross = (torch.maximum(down, right) < radius) & (torch.minimum(down, right) < radius / 3)
        inside = cross if label == 2 else down**2 + right**2 < radius**2
        y[inside] = label
    x = (y > 0).float() + 0.2 * torch.randn(y.shape, generator=generator)
    return x[:, None], y


def side_by_side(truth: Tensor, answer: Tensor) -> str:
    """Two label maps as text."""
    lines = zip(SHADES[truth[::2]].tolist(), SHADES[answer[::2]].tolist(), strict=True)
    return "\n".join(f"{bytes(a).decode()}  |  {bytes(b).decode()}".rstrip() for a, b in lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer pictures")
    quick = parser.parse_args(arguments).quick
    side, count, epochs = (24, 160, 6) if quick else (32, 400, 8)
    train, test = pictures(count, side, seed=0), pictures(100, side, seed=1)

    torch.manual_seed(0)
    model = opteq_segmenter(1, 3, channels=(12,), hidden=(12, 12, 12), constrained=True)
    config = TrainConfig(epochs=epochs, batch_size=8, lr=2e-2, schedule="onecycle", flip=True)
    result = fit(model, train, test, config, verbose=False)
    miou, pixels = result.scores["valid_miou"], result.scores["valid_accuracy"]

    model.eval()
    with torch.no_grad():
        answer = model(test[0]).argmax(1)
        found = model.solve(test[0])
    print("Truth and answer, of the first new picture:")
    print(side_by_side(test[1][0], answer[0]))
    print(f"{count_parameters(model)['total']:,} parameters, {result.steps} steps. {found}")
    for label, name in enumerate(CLASSES):
        both, either = (test[1] == label) & (answer == label), (test[1] == label) | (answer == label)
        print(f"{name:10} {both.sum() / either.sum():.1%} intersection over union")
    print(f"mIoU {miou:.1%}, {pixels:.1%} of the pixels are right.")
    return {"miou": miou, "converged": float(found.converged.double().mean())}


if __name__ == "__main__":
    main()
