"""The benchmarks: their arithmetic against known answers, peers on small problems, and the page that is made of the figures."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package

import contest  # noqa: E402
import figure  # noqa: E402
import measure  # noqa: E402
import others  # noqa: E402
import page  # noqa: E402
import peer_torchdeq  # noqa: E402
import races  # noqa: E402
import run  # noqa: E402
import show  # noqa: E402
import summary  # noqa: E402
import tangent  # noqa: E402
import workloads  # noqa: E402
from store import Store  # noqa: E402

from opteq.experiments._harness import digest  # noqa: E402

JSON, PAGE, FIGURE = ROOT / "results/benchmarks.json", ROOT / "docs/benchmarks.md", ROOT / "docs/figures/benchmarks.png"
MACHINE = {"processor": "x86_64, AVX2", "cores": 2, "system": "Linux", "python": "3.11", "torch": "2.13"}


def small(train: bool = True, **kwargs) -> workloads.Problem:
    return workloads.one_layer("OptEq 12 x 16", 12, 16, 6, torch.float64, 1e-6, None, train=train, **kwargs)


# --- arithmetic -----------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_turns_with_its_quartiles():
    found = measure.Ratio.of([2, 8, 6, 4, 10, 12, 14], [2, 2, 2, 2, 2, 2, 2])
    assert (found.median, found.low, found.high) == (4, 2, 6)
    assert str(found) == "4.00 (2.00-6.00)"
    with pytest.raises(ValueError, match="longer"):
        measure.Ratio.of([1.0], [1.0, 2.0])


def test_contestants_take_turns_and_the_first_turn_does_not_count():
    calls = []
    times = measure.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(found) for found in times.values()] == [3, 3]


def test_work_is_that_of_the_products_by_dtype_and_the_calls():
    a, b, large = torch.randn(3, 5), torch.randn(5, 7), torch.zeros(measure.Work.LARGE)
    images, kernels = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)

    def run():
        torch.nn.functional.conv2d(images, kernels)
        a.double() @ b.double()
        return a @ b, a.T, large[None], large + 1

    work = measure.Work.of(run)
    conv = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert work.flops == {torch.float32: 2 * 3 * 5 * 7 + conv, torch.float64: 2 * 3 * 5 * 7}
    assert work.calls() == {"products": 3, "large": 1, "small": 4}  # two conversions, and two views, however large


def test_work_counts_the_products_of_a_backward_pass():
    a, W = torch.randn(64, 256), torch.randn(256, 256, requires_grad=True)
    work = measure.Work.of(lambda: measure.product(a, W).sum().backward())
    assert work.flops == {torch.float32: 2 * 2 * 64 * 256 * 256}
    assert work.products == 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_work_counts_the_products_of_onednn():
    a, B = torch.randn(3, 5), torch.randn(7, 5)
    work = measure.Work.of(lambda: torch.ops.mkldnn._linear_pointwise(a, B, None, "none", [], ""))
    assert work.flops == {torch.float32: 2 * 3 * 5 * 7}


def test_the_share_is_of_each_turn():
    work = measure.Work()
    work.flops.update({torch.float64: 100, torch.float32: 300})
    rates = {torch.float64: [10.0, 20.0, 10.0], torch.float32: [100.0, 100.0, 150.0]}  # 13, 8 and 12 s at the limit
    assert work.share([16.25, 10.0, 20.0], rates) == pytest.approx(0.8)
    assert work.share([1.0, 1.0, 1.0], rates) == 1
    times, rates = measure.beside_gemm({"a": lambda: None}, 2)
    assert (list(times), list(rates)) == (["a"], [torch.float32, torch.float64])
    assert all(len(found) == 2 and min(found) > 0 for found in rates.values())


def test_the_shares_of_the_operations_add_up_to_at_most_one():
    found = measure.operations(lambda: torch.randn(50, 50) @ torch.randn(50, 50), most=100)
    assert "mm" in found
    assert math.isclose(sum(found.values()), 1)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_laws_are_recovered():
    x = [1.0, 2.0, 5.0, 10.0]
    assert measure.power_law(x, [3 * v**1.7 for v in x]) == pytest.approx((3, 1.7))
    assert measure.line(x, [3 - 0.5 * v for v in x]) == pytest.approx((3, -0.5))
    assert measure.linear_and_square(x, [3 * v + 0.2 * v**2 for v in x]) == pytest.approx((3, 0.2))
    assert measure.linear_and_square(x, [3 * v - 0.01 * v**2 for v in x])[1] == 0  # no negative part
    assert others.law([1e1, 1e2, 1e4], [2.0, 3.0, 5.0], "decades") == pytest.approx({"constant": 1.0, "per_decade": 1.0})


def test_an_extrapolation_gives_the_smaller_ratio():
    found = others.extrapolated([10, 20, 40], [20.0 + 10, 40.0 + 40, 80.0 + 160], 1000, 100.0)  # 2 N + N^2 / 10
    assert found["linear_and_square"] == pytest.approx(2 * 1000 + 0.1 * 1000**2)
    assert found["power_law"] < found["linear_and_square"]
    assert found["linear"] == pytest.approx(240 / 40 * 1000)
    assert found["linear"] < found["power_law"]
    assert found["over_opteq"] == pytest.approx(found["linear"] / 100)
    cheaper = others.extrapolated([10, 20, 40], [v**0.9 for v in (10, 20, 40)], 1000, 100.0)
    assert cheaper["over_opteq"] == pytest.approx(cheaper["power_law"] / 100)


def test_a_curve_of_two_points_has_no_law():
    found = others.fitted({"opteq": [(1, 2), (2, 4), (4, 8)], "unrolled": [(1, 2), (2, 4)]}, "power")
    assert found["opteq"]["law"] == pytest.approx({"constant": 2, "exponent": 1})
    assert found["unrolled"]["law"] is None


def test_the_import_is_timed():
    assert 0 < measure.import_seconds(1)[0] < 60


# --- contestants ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_those_without_other_libraries_meet_the_tolerance(train):
    problem = small(train)
    for who in (contest.ours, contest.unrolled):
        assert contest.meets(problem, who(problem).result)


def test_unrolling_that_does_not_get_there_is_left_out():
    with pytest.raises(contest.LeftOut, match="misses 1e-06 in 2 steps"):
        contest.unrolled(small(), longest=2)


def test_a_wrong_solution_and_a_wrong_gradient_are_noticed():
    problem = small()
    run = contest.ours(problem).result
    assert not contest.meets(problem, lambda: 1.001 * run())

    def wrong() -> torch.Tensor:
        z = run()
        problem.cell.W.grad *= 1.001
        return z

    assert not contest.meets(problem, wrong)


def test_the_fastest_that_meets_the_tolerance_is_first(monkeypatch):
    problem = small(train=False)
    run = contest.ours(problem).result
    took = {"slow": 3.0, "fast": 1.0, "wrong": 0.1}
    tried = {"slow": lambda: run(), "fast": lambda: run(), "wrong": lambda: 2 * run()}
    names = {one: name for name, one in tried.items()}
    monkeypatch.setattr(contest, "seconds", lambda one: took[names[one]])
    assert contest.fastest(tried, problem) == ["fast", "slow"]


@pytest.mark.parametrize(
    ("problem", "peer", "modules"),
    [
        (small(), "torchdeq", ["torchdeq"]),
        (small(), "torchdeq-anderson", ["torchdeq"]),
        (small(train=False), "jax", ["jax", "jaxopt"]),
        (small(), "jax", ["jax", "jaxopt"]),
        (workloads.monotone("Monotone 12", 12, 6, torch.float64, 1e-6), "jax", ["jax", "jaxopt"]),
        (workloads.gaussian("Gaussian 12", 12, 6, torch.float32, 1e-4), "jax", ["jax", "jaxopt"]),
        (small(), "cvxpylayers", ["cvxpylayers"]),
    ],
)
@pytest.mark.filterwarnings("default")  # of other libraries
def test_peers_meet_the_tolerance(problem, peer, modules):
    for module in modules:
        pytest.importorskip(module)
    assert contest.meets(problem, races.PEERS[peer](problem).result)


def test_torchdeq_is_called_by_its_solvers():
    assert peer_torchdeq.called(small(), "a", "b") == "a; backward b"
    assert peer_torchdeq.called(small(), "a", "a") == peer_torchdeq.called(small(train=False), "a", "b") == "a"


def test_who_is_missing_or_fails_is_left_out_with_the_reason(monkeypatch):
    def fails(problem):
        raise contest.LeftOut("misses 1e-06")

    monkeypatch.setitem(races.PEERS, "unrolled", fails)
    monkeypatch.setitem(races.NEEDS, "jax", ["no_such_module"])
    contestants, left_out = races.field(small(), ("unrolled", "jax"))
    assert list(contestants) == ["opteq"]
    assert left_out == {"unrolled": "misses 1e-06", "jax": "not installed: no_such_module"}


def test_a_race_says_what_was_reached_and_runs_the_same_settings_once(monkeypatch):
    ran = []

    def peer(problem):
        inner = contest.ours(problem)

        def step():
            ran.append(1)
            return inner.run()

        return contest.Contestant("the same", step, inner.result, in_torch=False)

    monkeypatch.setitem(races.PEERS, "torchdeq", peer)
    monkeypatch.setitem(races.PEERS, "torchdeq-anderson", peer)
    monkeypatch.setitem(races.NEEDS, "torchdeq", [])
    problem = small(goal=2)
    found = races.race(problem, 2, ("torchdeq", "torchdeq-anderson"))
    assert len(ran) == 3 + 1  # the turns, and once for `cores`
    rows = found["contestants"]
    assert rows["torchdeq"] is rows["torchdeq-anderson"]
    assert rows["opteq"]["over_opteq"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["opteq"]["residual"] <= problem.tol
    assert rows["opteq"]["states"] > 0
    assert rows["torchdeq"]["states"] is None
    assert found["evaluations"] > 1


def test_the_best_is_the_fastest_in_the_race():
    same = {"opteq": "opteq", "torchdeq": "torchdeq", "torchdeq-anderson": "torchdeq-anderson", "jax": "jax"}
    times = {"opteq": [1.0], "torchdeq": [3.0, 3.0, 9.0], "torchdeq-anderson": [4.0, 2.0, 2.0], "jax": [0.1]}
    assert races.overtaken(same, times) == {"torchdeq": "torchdeq-anderson"}
    assert races.overtaken({"opteq": "opteq", "unrolled": "unrolled"}, times) == {}


# --- the tangent kernel and the rest --------------------------------------------------------------------------------------------


def test_the_kernels_of_torch_func_are_ours():
    kernel = tangent.Kernel(24, 5)
    K = kernel.ours()
    for way in (kernel.by_adjoint, kernel.by_jacrev):
        torch.testing.assert_close(kernel.contracted(way), K, rtol=1e-9, atol=1e-9)


def test_a_kernel_that_does_not_converge_is_no_figure():
    with pytest.raises(RuntimeError, match="does not converge"):
        tangent.steps(lambda z: z + 1, torch.zeros(1), most=10)


def test_the_record_of_the_kernel():
    found = others.kernel(1, small=(2, 3, 4), large=6, width=16)
    assert [point["N"] for point in found["points"]] == [2, 3, 4]
    for point in found["points"]:
        assert all(row["difference"] < 1e-9 for row in point["torch_func"].values())
    assert set(found["extrapolated"]) == {"adjoint", "jacrev"}
    assert 0 < found["share_of_gemm"] < 1
    assert others.kernel_curve(1, (2, 3, 4), 16)["lines"]["opteq"]["law"] is not None


def test_a_curve_has_a_point_for_each_value(monkeypatch):
    curve = others.Curve("OptEq", "batch", (2, 4, 8), lambda v: others.layer(features=12, batch=int(v)))
    monkeypatch.setitem(others.CURVES, "curve-test", curve)
    monkeypatch.setattr(others, "COMPARED", ("unrolled",))
    found = others.curve("curve-test", 1)
    assert found["lines"]["opteq"]["x"] == found["lines"]["unrolled"]["x"] == [2, 4, 8]
    assert "exponent" in found["lines"]["opteq"]["law"]


@pytest.mark.parametrize(("name", "size"), [("curve-width", 32), ("curve-condition", 10.0)])
def test_a_curve_changes_what_it_says(name, size):
    problem = others.CURVES[name].problem(size)
    W = problem.cell.W
    if name == "curve-width":
        assert W.shape == (size, size)
    else:
        assert 1 / (1 - float(torch.linalg.matrix_norm(W.detach(), 2)) ** 2) == pytest.approx(size)


# --- the file, the table and the page -------------------------------------------------------------------------------------------


def row(ratio: float, gradient: float | None = 1e-5, states: float | None = 10.0) -> dict:
    spread = {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}
    return {"settings": f"set {ratio}", "milliseconds": 10 * ratio, "over_opteq": spread, "residual": 1e-5,
            "gradient_error": gradient, "cores": 1.0, "states": states, "share_of_gemm": states and 0.5,
            "calls": states and {"products": 20, "large": 300, "small": 4000}}  # fmt: skip


def raced(name: str, ratio: float, goal: float | None, train: bool = True) -> dict:
    rows = {"opteq": row(1.0, 1e-4 if train else None), "torchdeq": row(ratio), "jax": row(2.0, states=None)}
    return {"name": name, "title": f"{name}, ||W|| 0.99", "train": train, "goal": goal, "against": "torchdeq", "rounds": 7,
            "evaluations": 12, "operations": {"mm": 0.6}, "contestants": rows, "left_out": {"unrolled": "misses 1e-06"}
            }  # fmt: skip


@pytest.fixture
def store(tmp_path) -> Store:
    found = Store(MACHINE, tmp_path / "figures.json")
    for count in (1, 2):
        for name, ratio, goal in (("opteq", 8.0, 4), ("monotone", 2.0, 8)):
            found.put(count, "races", name, raced(name, ratio, goal))
        found.put(count, "races", "mixed", raced("mixed", 1.1, 5, train=False))
    overhead = {
        "name": "Picard",
        "title": "OptEq: Picard",
        "evaluations": 9,
        "over_bare_f": {"median": 1.2, "low": 1.1, "high": 1.3},
        "beside_f": {"products": 0.46, "large": 5.63, "small": 24.2},
    }
    found.put(1, "overheads", "overhead", overhead)
    points = [{"tolerance": tol, "evaluations": 9, "states": states} for tol, states in ((1e-2, 11.0), (1e-8, 11.5))]
    found.put(1, "memory", "memory", {"name": "opteq", "title": "OptEq", "points": points})
    found.put(1, "imports", "import", {"name": "import", "median": 0.2, "low": 0.1, "high": 0.3})
    found.put(1, "kernels", "kernel", others.kernel(1, small=(2, 3, 4), large=6, width=16))
    for name, fit in (
        ("curve-batch", "power"),
        ("curve-tolerance", "decades"),
        ("curve-kernel", "power"),
        ("curve-width", "power"),
    ):
        lines = others.fitted({"opteq": [(10, 2), (100, 4), (1000, 8)], "torchdeq-anderson": [(10, 5), (100, 9)]}, fit)
        found.put(1, "curves", name, {"name": name, "title": name, "axis": "what", "fit": fit, "lines": lines})
    return found


def test_pieces_are_merged_into_a_file_of_the_same_machine(store):
    again = Store(MACHINE, store.path)
    assert again.data == store.data
    assert again.has(1, "overhead")
    assert not again.has(2, "overhead")
    again.put(2, "races", "opteq", raced("opteq", 5.0, 4))
    again.put(4, "races", "opteq", raced("opteq", 5.0, 4))
    found = json.loads(store.path.read_text())["threads"]
    assert [one["name"] for one in found["2"]["races"]] == ["opteq", "monotone", "mixed"]
    assert found["2"]["races"][0]["contestants"]["torchdeq"]["over_opteq"]["median"] == 5
    assert found["1"]["races"][0]["contestants"]["torchdeq"]["over_opteq"]["median"] == 8
    assert list(found) == ["1", "2", "4"]
    with pytest.raises(ValueError, match="another machine"):
        Store(MACHINE | {"cores": 64}, store.path)


def test_records_keep_the_order_of_the_pieces(tmp_path):
    found = Store(MACHINE, tmp_path / "figures.json", ["opteq", "mixed"])
    for count, name in ((2, "mixed"), (2, "opteq"), (1, "mixed")):
        found.put(count, "races", name, raced(name, 3.0, 4))
    assert {count: [one["name"] for one in records["races"]] for count, records in found.data["threads"].items()} == {
        "1": ["mixed"],
        "2": ["opteq", "mixed"],
    }
    assert list(found.data["threads"]) == ["1", "2"]


def test_a_store_without_a_file_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Store(MACHINE).put(1, "races", "opteq", raced("opteq", 5.0, 4))
    assert not list(tmp_path.iterdir())


def test_means_and_goals(store):
    assert summary.geometric_mean([8.0, 2.0]) == pytest.approx(4)
    assert summary.train_ratios(store.records(1), "torchdeq") == {"opteq": 8.0, "monotone": 2.0}  # no forward pass
    found = {one.what: one for one in summary.goals(store.data)}
    assert found["opteq, ||W|| 0.99, 1 thread"].met
    assert not found["monotone, ||W|| 0.99, 2 threads"].met
    assert found["geometric mean over train steps, 1 thread"].measured == "4.00 x"
    assert found["geometric mean over train steps, 1 thread"].met
    assert not found["smallest ratio (mixed), 2 threads"].met
    assert not found["opteq, 1 thread: its gradient error at most that of torchdeq"].met
    assert not found["solve time / bare f, Picard, 1 thread"].met
    assert found["states in memory, opteq"].met
    assert found["import opteq after torch"].met


def test_a_missed_goal_says_what_is_in_the_way(store):
    store.put(1, "races", "deep", raced("deep", 5.0, 8))
    found = {one.what: one for one in summary.goals(store.data)}
    limited = "the number of products: with nothing but these, at the machine's limit, it would be 4.00 x"
    beside = (
        "300 large and 4000 small calls of PyTorch beside the products, which at the machine's limit would take 50% of the time"
    )
    assert found["monotone, ||W|| 0.99, 1 thread"].bound == limited
    assert found["deep, ||W|| 0.99, 1 thread"].bound == found["smallest ratio (mixed), 1 thread"].bound == beside
    overhead = "an evaluation comes with 0.5 products, 5.6 large and 24.2 small calls of PyTorch beside those of f"
    assert found["solve time / bare f, Picard, 1 thread"].bound == overhead
    assert all(one.bound for one in found.values() if not one.met and one.goal.endswith(" x"))
    text = page.page(store.path.read_text())
    assert f"| 8 x | 2.00 x | **missed** | {limited} |" in text
    assert "| 4 x | 8.00 x | met |  |" in text
    assert "| opteq | 1 thread | 12 | 20 | 300 | 4000 | 50% | 16.00 | 4 | `mm` 60% |" in text
    assert "| OptEq: Picard | 1 thread | 9 | 1.20 (1.10-1.30) | 0.5 | 5.6 | 24.2 |" in text


def test_the_mean_is_bound_by_the_mean_of_the_shares(store):
    for share, name in ((0.25, "opteq"), (1.0, "monotone")):
        next(one for one in store.records(1)["races"] if one["name"] == name)["contestants"]["opteq"]["share_of_gemm"] = share
    store.records(1)["races"][0]["contestants"]["torchdeq"]["over_opteq"]["median"] = 4.5
    found = {one.what: one for one in summary.goals(store.data)}["geometric mean over train steps, 1 thread"]
    assert (found.measured, found.met) == ("3.00 x", False)  # of 4.5 and 2, which are 18 and 2 at the limit
    assert found.bound == "what is done beside the products, which at the machine's limit would take 50% of the time"


def test_memory_that_grows_is_no_goal_met():
    points = [{"tolerance": tol, "evaluations": 9, "states": states} for tol, states in ((1e-2, 4.0), (1e-8, 11.5))]
    (goal,) = summary.cost_goals({"memory": [{"name": "opteq", "points": points}]})
    assert (goal.met, goal.measured) == (False, "11.5, growing")


def test_the_page_has_the_figures(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["page.py", "--json", str(store.path), "--docs", str(tmp_path)])
    page.main()
    text = (tmp_path / "benchmarks.md").read_text()
    assert text == page.page(store.path.read_text())
    assert "| opteq | opteq, \\|\\|W\\|\\| 0.99 | 10.0 | 8.00 (7.20-8.80) | misses | 2.00 (1.80-2.20) | 4 |" in text
    assert "- torchdeq, best, train steps: geometric mean 4.00, from 2.00 to 8.00, over 2 of them" in text
    assert "extrapolated" in text
    assert "`mm` 60%" in text
    assert digest(store.path.read_text()).encode() in (tmp_path / "figures" / "benchmarks.png").read_bytes()
    monkeypatch.setattr(sys, "argv", ["page.py", "--json", str(store.path), "--readme"])
    capsys.readouterr()
    page.main()
    assert "torchdeq at its best, geometric mean: 4.0 times as fast (2.0 to 8.0) on 1 thread; 4.0" in capsys.readouterr().out


def test_the_figure_has_a_panel_for_each_thread_count_and_each_curve(store):
    drawn = figure.figure(store.data)
    titles = [ax.get_title() for ax in drawn.axes if ax.get_visible()]
    assert titles == ["1 thread", "2 threads", "curve-batch", "curve-tolerance", "curve-kernel", "curve-width"]
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()] == ["opteq", "monotone", "mixed"]
    del store.data["threads"]["1"]["curves"]
    assert len(figure.figure(store.data).axes) == 2


def test_the_table_has_a_row_for_each_figure(store):
    for records in store.data["threads"].values():
        table = show.shown(records, "title")
        assert table.row_count >= 4 * len(records["races"])


def asked(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return run.arguments()


def test_curves_and_memory_are_measured_once(monkeypatch):
    options = asked(monkeypatch)
    assert run.wanted(options, 1) == list(run.NAMES)
    assert run.wanted(options, 2) == [*races.RACES, "overhead", "kernel"]
    assert run.wanted(asked(monkeypatch, "curve-batch"), 2) == ["curve-batch"]
    assert run.wanted(asked(monkeypatch, "--quick"), 1) == list(run.QUICK)


@pytest.mark.parametrize(("wrong", "words"), [(["nothing"], "no such workload"), (["--resume"], "needs --json")])
def test_arguments_that_make_no_sense(wrong, words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        asked(monkeypatch, *wrong)
    assert words in capsys.readouterr().err


def test_a_run_resumes(monkeypatch, tmp_path, capsys):
    measured = []

    def fake(name, rounds, few):
        measured.append(name)
        return "races", [raced(name, 3.0, 4)]

    monkeypatch.setattr(run, "measured", fake)
    monkeypatch.setattr(run, "limit_threads", lambda count: None)
    threads, path = torch.get_num_threads(), str(tmp_path / "figures.json")
    try:
        for names in (["opteq"], ["opteq", "mixed"]):
            monkeypatch.setattr(sys, "argv", ["run.py", *names, "--threads", "1", "--json", path, "--resume"])
            run.main()
    finally:
        torch.set_num_threads(threads)
    assert measured == ["opteq", "mixed"]
    assert "3.00" in capsys.readouterr().out


def test_each_thread_count_has_its_process(monkeypatch):
    commands = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, check: commands.append(command[2:]))
    monkeypatch.setattr(sys, "argv", ["run.py", "opteq", "--threads", "1", "2", "--json", "f.json", "--resume"])
    run.main()
    assert commands == [["opteq", "--threads", str(n), "--rounds", "7", "--json", "f.json", "--resume"] for n in (1, 2)]


def test_the_page_in_the_repository_is_up_to_date():
    assert JSON.exists() == PAGE.exists() == FIGURE.exists(), "run `python benchmarks/page.py`"
    if JSON.exists():
        text = JSON.read_text()
        assert PAGE.read_text() == page.page(text), "run `python benchmarks/page.py`"
        assert digest(text).encode() in FIGURE.read_bytes(), "run `python benchmarks/page.py`"
