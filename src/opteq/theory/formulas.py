"""The problems of `recover_problem` in words, as plain text and LaTeX."""

from torch import Tensor

from opteq.cells.deep import RegularizedStep
from opteq.cells.optimization import OptEqCell

_SIGMA: dict[str, tuple[str, str]] = {  # sigma~*(s), as text and LaTeX
    "relu": ("s^2/2 for s >= 0, else infinite", r"\tfrac12 s^2 + \iota_{s \ge 0}"),
    "tanh": ("((1+s) log(1+s) + (1-s) log(1-s))/2 for |s| <= 1", r"\tfrac12[(1+s)\log(1+s) + (1-s)\log(1-s)]"),
    "sigmoid": ("s log s + (1-s) log(1-s) + log 2 for 0 <= s <= 1", r"s\log s + (1-s)\log(1-s) + \log 2"),
    "identity": ("s^2/2", r"\tfrac12 s^2"),
}


def one_layer(cell: OptEqCell) -> tuple[str, str]:
    """phi and its dual; the symbols are those of the parameters."""
    name = cell.activation.name
    known = _SIGMA.get(name)
    conjugate = f", sigma~*(s) = {known[0]}" if known else ""
    conjugate_latex = rf",\quad \tilde\sigma^*(s) = {known[1]}" if known else ""
    text = (
        "minimise over z: phi(z) = psi*(z) - |z|^2/2, psi(z) = (1/mu) sum_i sigma~(W z + U x + b)_i, "
        f"sigma~ the integral of {name}; that is z = W's/mu where s minimises "
        f"sum_i sigma~*(s_i) - <U x + b, s> - |W's|^2/(2 mu){conjugate}"
    )
    latex = (
        r"\min_z\ \varphi(z) = \psi^*(z) - \tfrac12\|z\|^2,\quad "
        r"\psi(z) = \tfrac1\mu \mathbf 1^\top\tilde\sigma(Wz + Ux + b);\quad "
        r"z = \tfrac1\mu W^\top s,\ s \in \arg\min_s\ \mathbf 1^\top\tilde\sigma^*(s) - \langle Ux + b, s\rangle"
        rf" - \tfrac1{{2\mu}}\|W^\top s\|^2{conjugate_latex}"
    )
    return with_skip(cell, text, latex)


def regularized(text: str, latex: str, step: RegularizedStep) -> tuple[str, str]:
    """h + gamma R, or h plus the envelope of gamma R, h being the problem already stated."""
    R, tex, gamma = step.regularizer.formula, step.regularizer.latex, f"{step.gamma:g}"
    if step.mode == "gradient":
        return (
            f"minimise over z: h(z) + {gamma} R(z), R(z) = {R}; h: {text}",
            rf"\min_z\ h(z) + {gamma}\,R(z),\ R(z) = {tex};\quad h:\ {latex}",
        )
    return (
        f"minimise over z: h(z) + M^1_(gamma R)(z), the Moreau envelope of gamma R with gamma = {gamma}, R(z) = {R} "
        f"(not h + gamma R); h: {text}",
        rf"\min_z\ h(z) + M^1_{{\gamma R}}(z),\ \gamma = {gamma},\ R(z) = {tex};\quad h:\ {latex}",
    )


TWO_LAYERS = (
    "minimise over (z_1, z_0): alpha_1 M_phi_1^{1-alpha_1}(z_1) + alpha_2 M_phi_2^{1-alpha_2}(z_0) + |z_1 - z_0|^2/2, "
    "phi_l the function of layer l",
    r"\min_{z_1, z_0}\ \alpha_1 M_{\varphi_1}^{1-\alpha_1}(z_1) + \alpha_2 M_{\varphi_2}^{1-\alpha_2}(z_0) "
    r"+ \tfrac12\|z_1 - z_0\|^2",
)
WIDE = (
    "minimise over (x_1, ..., x_L, z): sum_l alpha_l (phi_l(x_l) + |x_l - z|^2/2), phi_l the function of layer l; "
    "as one layer, phi = psi* - |.|^2/2 with psi = sum_l alpha_l psi_l / sum_l alpha_l",
    r"\min_{x_1, \dots, x_L, z}\ \sum_l \alpha_l \left(\varphi_l(x_l) + \tfrac12\|x_l - z\|^2\right)",
)


def affine(cell: OptEqCell) -> tuple[str, str]:
    """phi of the layer inside, at A z + t."""
    text, latex = "minimise over z: phi(A z + t), phi the function of the layer inside", r"\min_z\ \varphi(A z + t)"
    return with_skip(cell, text, latex)


def multivariate(cell: OptEqCell) -> tuple[str, str]:
    """A quadratic."""
    text = "minimise over z: phi(z) = psi*(z) - |z|^2/2, psi(z) = (W z + U x + b)' S (W z + U x + b)/(2 mu): a quadratic"
    latex = (
        r"\min_z\ \varphi(z) = \psi^*(z) - \tfrac12\|z\|^2,\quad "
        r"\psi(z) = \tfrac1{2\mu}(Wz + Ux + b)^\top S\,(Wz + Ux + b)"
    )
    return with_skip(cell, text, latex)


def with_skip(cell: OptEqCell, text: str, latex: str) -> tuple[str, str]:
    """What a skip connection changes."""
    if not isinstance(cell.alpha, Tensor) and cell.alpha == 1:
        return text, latex
    return (
        text + "; with the skip connection alpha M_phi^{1-alpha}, which has the same minimisers",
        latex + r";\quad \text{with the skip connection } \alpha M_\varphi^{1-\alpha}",
    )


def inclusion(layers: int, step: RegularizedStep | None) -> tuple[str, str]:
    """Eq. (8), with what a regulariser really adds to it."""
    blocks = ", ".join([*(f"z_{i}" for i in range(1, layers)), "z_0"] if layers < 4 else ["z_1", "...", f"z_{layers - 1}", "z_0"])
    text = (
        f"find z~ = ({blocks}) with 0 in dPhi(z~) + (I - P) z~, "
        "Phi(z~) = sum_l alpha_l M_phi_l^{1-alpha_l}(z_l), P the cyclic shift of the blocks"
    )
    latex = (
        r"0 \in \partial\Phi(\tilde z) + (I - P)\tilde z,\quad "
        r"\Phi(\tilde z) = \sum_l \alpha_l M_{\varphi_l}^{1-\alpha_l}(z_l)"
    )
    if step is None:
        return text, latex
    R, tex = step.regularizer.formula, step.regularizer.latex
    if step.mode == "gradient":
        return (
            text + f", and gamma grad R(z_0) added to the first row, R(z) = {R}",
            latex + rf" + \gamma \nabla R(z_0)\,e_1,\ R(z) = {tex}",
        )
    return (
        text + f", with one more block on which Phi is gamma R, R(z) = {R}",
        latex + rf" + \gamma R(z_{{{layers + 1}}}),\ R(z) = {tex}",
    )
