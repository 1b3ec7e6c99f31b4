"""The command: exit codes, one line an error with its remedy, and what each command prints and writes."""

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import grid_work
import opteq
from data_files import random_bytes, write_camvid, write_idx, write_image
from opteq import cli, experiments
from opteq.cli import bench, certify, common, processes, train
from opteq.grids import run_grid
from opteq.recipes import KINDS, Data, Gaussian, Monotone, Recipe, load_model
from opteq.runs import Run
from opteq.training import Callback, DivergenceError, LostProcessError, World
from opteq.training.watch import Trouble

TINY = ["--channels", "4", "--hidden", "4", "--data.limit", "24", "--data.test-limit", "12", "--train.batch-size", "12"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every command runs in a folder of its own, on one process, with no data but what the test writes."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OPTEQ_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def check_error(capsys, code: int, expected: int, *words: str) -> None:
    """The exit code, and one line on stderr with the words."""
    captured = capsys.readouterr()
    assert code == expected
    assert captured.err.startswith("opteq: error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def check_refused(capsys, code: int, *words: str) -> None:
    """What the parser says about wrong usage."""
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code == 2
    for word in words:
        assert word in text


# --- the command as a whole -----------------------------------------------------------------------------------------------------


def test_the_command_runs_as_a_module(capsys):
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "opteq", "--version"], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == f"opteq {opteq.__version__}\n"
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == done.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_help_names_every_command_with_an_example_and_the_exit_codes(arguments, capsys):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in text
        assert f"$ {command.example}" in text
        assert command.example.startswith(f"opteq {name}")
    assert "130  interrupted" in text


@pytest.mark.parametrize(
    "command", [["train"], ["certify"], ["landscape"], ["report"], ["data", "list"], ["data", "show"], ["info"]]
)
def test_the_help_of_a_command_teaches_by_an_example_and_shows_defaults(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"$ opteq {command[0]}" in text
    assert "(default: " in text


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "bench"])  # which hands its arguments on
def test_the_examples_of_the_help_are_ones_that_the_parser_takes(name, monkeypatch, capsys):
    """They get as far as that: it takes them in earnest, and then the command ends."""
    module, parse = importlib.import_module(f"opteq.cli.{name}"), common.parse

    def parsed(*given, **named):
        parse(*given, **named)
        raise SystemExit(0)

    monkeypatch.setattr(module, "parse", parsed, raising=False)
    monkeypatch.setattr(common, "parse", parsed)  # of what imports it when it is called
    examples = [cli.COMMANDS[name].example, *re.findall(r"^ +\$ (opteq [^\n\"]*)", Path(module.__file__).read_text(), re.MULTILINE)]
    for example in examples:
        if not {"--resume", "--help"} & set(example.split()):  # it would read the run, or read no further
            assert cli.main(shlex.split(example)[1:]) == 0, f"{example}: {capsys.readouterr().err}"


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    check_error(capsys, cli.main(["trian"]), 2, "no command 'trian'", "did you mean 'train'?")
    check_error(capsys, cli.main(["--verison"]), 2, "no command '--verison'", "did you mean '--version'?")
    check_error(capsys, cli.main(["x"]), 2, "see opteq --help")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("two\nlines   of it"), 2, "two lines of it"),
        (FileNotFoundError("not there"), 2, "not there"),
        (ImportError("A report needs jinja2: pip install 'opteq[report]'."), 2, "pip install 'opteq[report]'"),
        (ImportError("No module named 'tyro'", name="tyro"), 2, "pip install 'opteq[train,report]'"),
        (DivergenceError("Training stopped at step 3", Trouble("nan_loss", "head", 0.0, ""), 3), 3, "stopped at step 3"),
        (LostProcessError("another process died"), 4, "another process died"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("x"), 70, "ZeroDivisionError: x (again with --debug"),
    ],
)
def test_every_error_is_one_line_with_its_exit_code_and_the_traceback_only_on_demand(error, code, words, monkeypatch, capsys):
    def broken(arguments):
        raise error

    monkeypatch.setattr("opteq.cli.info.info", broken)
    check_error(capsys, cli.main(["info"]), code, words)
    assert cli.main(["--debug", "info"]) == code
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert "in broken" in captured
    assert "again with --debug" not in captured


def test_a_warning_is_one_line(monkeypatch, capsys):
    def warned(arguments):
        warnings.warn("first\nsecond", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr("opteq.cli.info.info", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["info"]) == 0
    assert capsys.readouterr().err == "opteq: warning: first second\n"


@pytest.mark.parametrize("left", [True, False])
def test_a_reader_that_goes_away_is_no_error_but_another_broken_pipe_is(left, monkeypatch, capsys):
    def broken(arguments):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("opteq.cli.info.info", broken)
    reading, writing = os.pipe()
    if left:
        os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        code = cli.main(["info"])
        if left:
            print("to nobody", file=pipe, flush=True)  # no error at the end of the process either
            assert code == 0
        else:
            check_error(capsys, code, 2, "a worker is gone")
            os.close(reading)


def test_a_broken_pipe_is_an_error_where_stdout_is_no_file(monkeypatch, capsys):
    def broken(arguments):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("opteq.cli.info.info", broken)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    check_error(capsys, cli.main(["info"]), 2, "a worker is gone")


def test_info_says_what_a_bug_report_needs(capsys):
    assert cli.main(["info"]) == 0
    assert torch.__version__ in capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["opteq"] == opteq.__version__
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["tyro"][0].isdigit()


def test_info_needs_no_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opteq.cli.common", None)  # what imports tyro and rich
    assert cli.main(["info"]) == 0
    assert json.loads(capsys.readouterr().out)["opteq"] == opteq.__version__


def test_info_knows_all_that_the_commands_may_import(capsys):
    extras = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split("[<>=]", package)[0] for name in ("train", "report", "dask", "tensorboard") for package in extras[name]}
    assert cli.main(["info", "--json"]) == 0
    assert wanted <= json.loads(capsys.readouterr().out).keys()


def test_info_says_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr("opteq.cli.info._OPTIONAL", ("surely-not-installed",))
    assert cli.main(["info"]) == 0
    assert "not installed" in capsys.readouterr().out


# --- data -----------------------------------------------------------------------------------------------------------------------


def test_data_list_tells_which_files_are_there(here, capsys):
    write_idx(here / "own" / "mnist")
    assert cli.main(["data", "list", "--root", "own"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
    assert (found["digits"], found["mnist"], found["cifar10"]) == ("yes", "yes", "no")


def test_data_show_tells_shapes_ranges_and_counts(here, capsys):
    assert cli.main(["data", "show", "digits"]) == 0
    text = capsys.readouterr().out
    for words in ("1,437", "1 x 8 x 8", "0..1", "labels 0..9", "142"):
        assert words in text
    assert cli.main(["data", "show", "sphere"]) == 0
    assert "labels" not in capsys.readouterr().out
    write_camvid(here / "data" / "camvid")
    assert cli.main(["data", "show", "camvid"]) == 0
    text = capsys.readouterr().out
    assert "pixels of each" in text
    assert "bicyclist" in text
    assert "valid" in text


# --- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["data", "show", "mnits"], ["train", "deep", "--data.name", "mnits"]])
def test_an_unknown_data_set_is_named_with_the_nearest_one(command, capsys):
    check_error(capsys, cli.main(command), 2, "'mnits'", "Did you mean 'mnist'?")


def test_missing_files_are_named_with_the_place_to_put_them(capsys):
    code = cli.main(["train", "deep", "--data.name", "cifar10", "--data.root", "nowhere"])
    check_error(capsys, code, 2, "cifar10", "data_batch_1.bin", "nowhere", "https://www.cs.toronto.edu")


def test_a_wrong_image_size_is_named(here, capsys):
    code = cli.main(["train", "multiscale", "--channels", "8", "8", "8", "--head", "4", "4", "4", "--data.limit", "8", "--dry-run"])
    check_error(capsys, code, 2, "multiscale cannot take the samples of digits, of shape [1, 8, 8]")
    code = cli.main(["train", "deep", "--stride", "4", "--data.limit", "8", "--folder", "run"])
    check_error(capsys, code, 2, "of shape [1, 8, 8]", "at least 4 x 4", "'2 x 2'")
    assert not (here / "run").exists()


def test_images_of_folders_have_one_size_unless_one_is_given(here, capsys):
    write_camvid(here / "data" / "camvid")
    write_image(here / "data" / "camvid" / "train" / "frame1.png", random_bytes(0, 10, 10, 3))
    check_error(capsys, cli.main(["train", "fcn", "--data.name", "camvid"]), 2, "frame1.png", "10 x 10", "size=")


def test_labels_out_of_range_are_named_with_their_file(here, capsys):
    write_camvid(here / "data" / "camvid")
    mask = here / "data" / "camvid" / "trainannot" / "frame1.png"
    write_image(mask, random_bytes(1, 6, 8) % 3 + 40)
    check_error(capsys, cli.main(["train", "fcn", "--data.name", "camvid"]), 2, "frame1.png", "from 0 to 10", "instead")


def test_an_unknown_option_is_refused_with_the_nearest_one(capsys):
    check_refused(capsys, cli.main(["train", "deep", "--train.lrr", "1"]), "Unrecognized options: --train.lrr", "--train.lr FLOAT")
    check_refused(capsys, cli.main(["train", "dep"]), "dep", "Available subcommands: deep")
    check_refused(capsys, cli.main(["train", "ode", "--hidden", "3"]), "--hidden")
    check_refused(capsys, cli.main(["info", "--jsn"]), "--jsn", "--json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.lr", "-1"], "'lr' parameter of TrainConfig must be a finite number > 0"),
        (["--train.lr", "fast"], "fast"),
        (["--train.epochs", "0"], "'epochs' parameter of TrainConfig must be an integer >= 1"),
        (["--train.optimizer", "lion"], "lion"),
        (["--data.limit", "0"], "'limit' parameter of Data must be an integer >= 1"),
        (["--hidden", "a"], "--hidden"),
    ],
)
def test_a_wrong_value_is_refused(arguments, words, capsys):
    check_refused(capsys, cli.main(["train", "deep", *arguments]), words)


@settings(max_examples=10)
@given(st.lists(st.text(max_size=8), max_size=4))
def test_no_argument_gets_a_traceback(arguments):
    """Whatever is written behind `opteq data`."""
    assert cli.main(["data", *arguments]) in (0, 2)


# --- train ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_takes_every_model_by_its_name(kind, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "show", lambda recipe: seen.append(recipe.kind) or 0)
    assert cli.main(["train", kind, "--dry-run", "--train.seed", "3"]) == 0
    assert seen == [kind]


def test_a_dry_run_prints_the_settings_and_the_sizes_and_trains_nothing(here, capsys):
    assert cli.main(["train", "deep", *TINY, "--train.lr", "0.5", "--dry-run"]) == 0
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert shown["train"]["lr"] == 0.5
    assert shown["model"]["kind"] == "deep"
    assert shown["about"]["shapes"] == {"train": [24, 1, 8, 8], "test": [12, 1, 8, 8], "output": [10]}
    parts = shown["about"]["parameters"]
    assert parts == {"extractor": 44, "equilibrium": 292, "head": 658, "total": 994}
    for words in ("24 x 1 x 8 x 8", "parameters, equilibrium", "292", "994"):
        assert words in captured.err
    assert list(here.iterdir()) == []


def test_what_a_dry_run_printed_is_a_configuration_that_options_may_change(here, capsys):
    assert cli.main(["train", "dense", "--features", "7", "--data.limit", "9", "--dry-run"]) == 0
    (here / "all.json").write_text(first := capsys.readouterr().out)
    assert cli.main(["train", "--config", "all.json", "--dry-run"]) == 0
    assert capsys.readouterr().out == first
    assert cli.main(["train", "--config=all.json", "--train.epochs", "3", "--dry-run"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["train"]["epochs"] == 3
    assert changed["model"]["features"] == 7


def test_a_configuration_that_is_none_is_refused(here, capsys):
    config = Recipe().to_json()
    config["train"]["lrr"] = 1
    (here / "bad.json").write_text(json.dumps(config))
    check_error(capsys, cli.main(["train", "--config", "bad.json"]), 2, "bad.json: train.lrr is no setting", "'lr'")
    check_error(capsys, cli.main(["train", "--config", "none.json"]), 2, "none.json")


def test_a_training_is_run_reported_and_resumed(here, monkeypatch, capsys):
    boards = []

    class Board(Callback):
        def __init__(self, folder):
            boards.append(folder)

        def row(self, row):
            assert (here / "runs" / "digits-deep-1" / "config.json").exists()  # the run came first
            boards.append(row["kind"])

        def close(self):
            boards.append("closed")

    monkeypatch.setattr(train, "TensorBoard", Board)
    arguments = ["train", "deep", *TINY, "--train.epochs", "2", "--train.device", "cpu", "--tensorboard"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    folder = here / "runs" / "digits-deep-1"
    result = json.loads((folder / "result.json").read_text())
    assert result["epochs"] == 2
    assert f"{result['valid_accuracy']:.2%}" in captured.out
    assert "994" in captured.out
    assert "opteq report runs/digits-deep-1" in captured.out
    assert "epoch 2" in captured.err
    assert (boards[0], boards[-1]) == (Path("runs/digits-deep-1/tensorboard"), "closed")
    assert "epoch" in boards
    before = (folder / "model.safetensors").read_bytes()

    for arguments, words in (
        (["--train.lr", "0.5"], "train.lr: 0.001 -> 0.5"),
        (["deep", "--channels", "5"], "model.channels: 4 -> 5"),
        (["dense"], "model.kind: 'deep' -> 'dense'"),
        (["--data.name", "mnist"], "data.name: 'digits' -> 'mnist'"),
    ):
        code = cli.main(["train", *arguments, "--resume", "runs/digits-deep-1"])
        check_error(capsys, code, 2, words, "undo the changes, or start a new run")
    code = cli.main(["train", "--resume", "runs/digits-deep-1", "--folder", "other"])
    check_error(capsys, code, 2, "leave --config and --folder out")

    assert cli.main(["train", "--resume", "runs/digits-deep-1", "--quiet", "--train.log-every", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert (folder / "model.safetensors").read_bytes() == before

    assert cli.main(["report", "runs/digits-deep-1"]) == 0
    assert capsys.readouterr().out.strip() == "runs/digits-deep-1/report.html"
    assert "minimise" in (folder / "report.html").read_text()
    assert cli.main(["landscape", "runs/digits-deep-1", "--steps", "3", "--samples", "24", "--dims", "1", "--out", "drawn"]) == 0
    assert "100.0% of the 3 points" in capsys.readouterr().out
    model, data = load_model(folder)
    middle = float((here / "drawn" / "landscape.csv").read_text().splitlines()[2].split(",")[1])
    with torch.no_grad():
        assert middle == pytest.approx(float(cross_entropy(model(data.train.x), data.train.y)), rel=1e-4)
    assert {path.name for path in (here / "drawn").iterdir()} == {f"landscape.{kind}" for kind in ("csv", "jsonl", "png", "svg")}
    check_error(capsys, cli.main(["train", "deep", *TINY, "--folder", "runs/digits-deep-1"]), 2, "already holds a run")
    check_error(capsys, cli.main(["landscape", "runs/digits-deep-1", "--steps", "4"]), 2, "--steps must be odd")
    assert cli.main(["report", "runs/digits-deep-1", "--out", "drawn"]) == 0
    assert (here / "drawn" / "report.html").exists()


def test_commands_to_go_on_with_can_be_pasted(here, capsys):
    assert cli.main(["train", "deep", *TINY, "--quiet", "--folder", "a b [x]"]) == 0
    assert "opteq report 'a b [x]'" in capsys.readouterr().out


def test_a_second_training_gets_a_folder_of_its_own(here):
    (here / "runs" / "digits-deep-1").mkdir(parents=True)
    assert str(train._free_folder(Recipe())) == "runs/digits-deep-2"


@pytest.mark.parametrize("name", ["../../evil", "/evil", "..", "a/b", "", "x" * 300, "a\0b"])
def test_the_folder_of_a_run_is_in_runs_whatever_the_data_are_called(name):
    folder = train._free_folder(Recipe(Data(name)))
    assert folder.parent == Path("runs")
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{1,150}-deep-1", folder.name)


def test_a_training_that_is_refused_leaves_no_folder(here, monkeypatch, capsys):
    check_error(capsys, cli.main(["train", "deep", "--data.name", "../evil", "--tensorboard"]), 2, "evil")
    check_error(capsys, cli.main(["train", "deep", *TINY, "--pool", "99", "--tensorboard"]), 2, "at least 99 x 99")
    vectors = ["--data.theory", "unit", "--data.limit", "6", "--data.test-limit", "4"]
    check_error(capsys, cli.main(["train", "dense", *vectors, "--train.crop", "2"]), 2, "'crop' parameter of fit must be 0")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    check_error(capsys, cli.main(["train", "deep", *TINY, "--tensorboard"]), 2, "pip install 'opteq[tensorboard]'")
    assert list(here.iterdir()) == []


def test_a_device_that_is_none_is_bad_input_and_no_fault_of_the_library(here, job, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")  # of a job
    check_error(capsys, cli.main(["train", "deep", *TINY, "--train.device", "warp"]), 2, "'device'", "warp")
    monkeypatch.delenv("RANK")
    for device in ("warp", "cuda:7"):
        check_error(capsys, cli.main(["train", "deep", *TINY, "--train.device", device]), 2, "a device of this machine", device)
    assert list(here.iterdir()) == []


def test_folders_without_a_run_are_refused(capsys):
    for command in (["train", "--resume", "none"], ["report", "none"], ["landscape", "none"], ["certify", "--run", "none"]):
        check_error(capsys, cli.main(command), 2, "none holds no run")
    check_error(capsys, cli.main(["report"]), 2, "opteq report runs/NAME")


def test_a_training_that_diverges_says_why_and_ends_with_3(capsys):
    arguments = ["train", "feed-forward", *TINY, "--train.optimizer", "sgd", "--train.lr", "1e30", "--train.schedule", "constant"]
    check_error(capsys, cli.main([*arguments, "--norm", "None", "--quiet"]), 3, "Training stopped at step", "lower lr")


def test_an_interrupted_training_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupted)
    check_error(capsys, cli.main(["train", "deep"]), 130, "opteq train --resume runs/digits-deep-1")


def test_the_summary_tells_of_roll_backs_and_early_stops(here, capsys):
    with Run.create(here / "run", {}) as run:
        run.write("result.json", {"parameters": {"total": 12345}, "valid_loss": 0.123456, "test_miou": 0.5})
    result = train.Result(7, 2, 1.5, "patience", 3, {}, [])
    train.summarize(result, here / "run")
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "stopped early (patience) after 2 epochs, 7 steps, 1.5 s",
        "12,345",
        "roll-backs 3",
        "test miou 50.00%",
        "0.1235",
    ):
        assert words in text


# --- several processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(monkeypatch):
    """The environment of process 1 of 2, with a process group that does nothing."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: calls.append(backend))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    return calls


def test_a_process_of_a_job_joins_the_others_and_leaves_them(job):
    with processes.process_group("cpu") as world:
        assert job == ["gloo"]
        assert world == World(device=torch.device("cpu"))  # there is no group: this one is only pretended
    assert job == ["gloo", "destroyed"]


def test_on_gpus_each_process_has_its_own(job):
    with pytest.raises(ZeroDivisionError), processes.process_group("cuda"):
        raise ZeroDivisionError
    assert job == [1, "nccl", "destroyed"]


def test_a_process_that_the_launcher_ends_says_so(job):
    before = processes.signal.getsignal(processes.signal.SIGTERM)
    with pytest.raises(LostProcessError, match="--resume"), processes.process_group("cpu"):
        processes.signal.raise_signal(processes.signal.SIGTERM)
    assert processes.signal.getsignal(processes.signal.SIGTERM) is before


def test_signals_are_left_alone_outside_of_the_main_thread(job):
    from concurrent.futures import ThreadPoolExecutor

    def join() -> str:
        with processes.process_group("cpu"):
            return processes.signal.getsignal(processes.signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(join).result() is processes.signal.getsignal(processes.signal.SIGTERM)


class Second(World):
    """The second process, which is told what the first one says."""

    def first_message(self, message):
        assert message is None
        return 0, "runs/chosen-by-the-first"


def test_all_processes_train_in_the_folder_of_the_first():
    assert processes.agree(Second(1, 2), "runs/mine") == "runs/chosen-by-the-first"
    assert processes.agree(World(), "runs/mine") == "runs/mine"


def test_only_the_first_process_prints_what_came_of_it(job, monkeypatch, capsys):
    monkeypatch.setattr(World, "here", lambda device: Second(1, 2, device))
    monkeypatch.setattr(train, "run", lambda *arguments, **options: None)
    assert cli.main(["train", "deep"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("seen by all"), False), (LostProcessError("died"), True), (FileNotFoundError("not on this machine"), True)],
)
def test_what_all_processes_see_only_the_first_one_says(error, told, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    cli.fail(error)
    text = capsys.readouterr().err
    assert text == (f"opteq: error: process 1: {error}\n" if told else "")


def test_a_lost_process_ends_the_job_with_4_and_names_the_folder(monkeypatch, capsys):
    def lost(*arguments, **options):
        raise LostProcessError("another process died; --resume.")

    monkeypatch.setattr(train, "run", lost)
    check_error(
        capsys, cli.main(["train", "deep", "--folder", "runs/x"]), 4, "another process died; --resume. The run folder is runs/x."
    )


# --- certify --------------------------------------------------------------------------------------------------------------------

FEW = ["--data.limit", "4", "--data.test-limit", "4", "--width", "16"]


def test_a_negative_verdict_ends_with_1_and_says_by_what_factor(capsys):
    assert cli.main(["certify", "scaled-relu", *FEW]) == 1
    text = capsys.readouterr().out
    assert "Verdict: not certified" in text
    assert "FAILS by a factor of" in text
    assert "What to change" in text
    assert cli.main(["certify", "scaled-relu", *FEW, "--train", "3"]) == 1
    assert "Not trained" in capsys.readouterr().out


def test_a_certified_start_is_found_trained_and_written(here, capsys):
    arguments = ["certify", "scaled-relu", *FEW, "--init", "--sharp", "--train", "5"]
    assert cli.main([*arguments, "--out", "made/certificate.json"]) == 0
    text = capsys.readouterr().out
    assert "CERTIFIED" in text
    assert "everything promised was kept" in text
    found = json.loads((here / "made" / "certificate.json").read_text())
    assert found["holds"] is True
    assert found["trained"]["steps"] == 5
    assert {"name", "formula", "lhs", "rhs", "slack", "evidence"} <= found["conditions"][0].keys()
    assert cli.main(["certify", "scaled-relu", *FEW, "--out", "made"]) == 1
    assert json.loads((here / "made" / "certificate.json").read_text())["holds"] is False


def test_a_broken_promise_ends_with_1(monkeypatch, capsys):
    class Broken:
        def explain(self) -> str:
            return "loss <= 1 is broken"

    def trained(model, X, y, certificate, steps):
        monitor = opteq.theory.certificates.Monitor(model, X, y, certificate, kernel=False)
        return monitor, Broken()

    monkeypatch.setattr("opteq.cli.certify.train_certified", trained)
    assert cli.main(["certify", "scaled-relu", *FEW, "--init", "--train", "1"]) == 1
    assert "BROKEN: loss <= 1 is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "theory", "norm"), [(Gaussian(), "off", 8.0), (Gaussian(), "unit", 1.0), (Monotone(), "off", 1.0)]
)
def test_the_data_of_a_certificate_have_the_norm_of_the_theory(model, theory, norm):
    """sqrt(d) of the 8 x 8 pixels of digits for gaussian."""
    _, X, y = certify._problem(certify.Certify(model, Data(limit=4, test_limit=4, theory=theory)))
    torch.testing.assert_close(X.norm(dim=1), torch.full((4,), norm, dtype=torch.float64))
    assert sorted(y.tolist()) == [-1, -1, 1, 1]


def test_where_no_start_is_certified_the_reason_is_printed(capsys):
    """Fewer units than samples: no scale helps."""
    assert cli.main(["certify", "scaled-relu", "--data.limit", "8", "--data.test-limit", "2", "--width", "4", "--init"]) == 1
    text = capsys.readouterr().out
    assert "found no scale" in text
    assert "width >= N" in text


def test_other_networks_and_flows_can_be_asked_about(capsys):
    assert cli.main(["certify", "gaussian", *FEW]) == 1
    assert "Gaussian DEQ, Theorem 1" in capsys.readouterr().out
    assert cli.main(["certify", "monotone", *FEW, "--flow", "--data.theory", "unit"]) == 1
    assert "flow" in capsys.readouterr().out
    assert cli.main(["certify", "dense", *FEW[:4]]) == 1
    assert "no guarantee is claimed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--train", "0"], ["--train", "3", "--flow"]])
def test_only_descent_can_be_trained(arguments, capsys):
    check_error(capsys, cli.main(["certify", "scaled-relu", *FEW, *arguments]), 2, "--train N needs N >= 1")


def test_a_run_is_certified_on_its_own_data(here, capsys):
    theory = ["--data.theory", "unit", "--data.limit", "6", "--data.test-limit", "4", "--train.epochs", "1", "--quiet"]
    assert cli.main(["train", "monotone", "--width", "8", *theory, "--folder", "m"]) == 0
    assert cli.main(["certify", "--run", "m"]) == 1
    text = capsys.readouterr().out
    assert "Theorem 3.3.5" in text
    assert " 8 " in text[text.index("width >= N") :].splitlines()[0]
    for more, words in (
        (["gaussian", "--run", "m"], "leave model out"),
        (["--run", "m", "--data.limit", "4", "--seed", "3"], "leave data and seed out"),
    ):
        check_error(capsys, cli.main(["certify", *more]), 2, "--run takes the model and its data from the run folder", words)
    assert cli.main(["train", "deep", *TINY, "--train.epochs", "1", "--quiet", "--folder", "d"]) == 0
    assert cli.main(["certify", "--run", "d"]) == 1
    assert "Assumption 5" in capsys.readouterr().out
    (here / "d" / "model.safetensors").unlink()
    assert cli.main(["certify", "--run", "d"]) == 1
    assert "d has no trained model yet: this is its checkpoint of step 2" in capsys.readouterr().err


# --- experiments and benchmarks -------------------------------------------------------------------------------------------------


def test_the_experiments_are_listed_with_their_results(capsys):
    assert cli.main(["experiment", "list"]) == 0
    text = capsys.readouterr().out
    for name in experiments.names():
        assert name in text
    assert "no result" in text
    assert cli.main(["experiment"]) == 0
    assert "opteq experiment list" in capsys.readouterr().out
    check_error(capsys, cli.main(["experiment", "list", "--all"]), 2, "takes no options")
    check_error(capsys, cli.main(["experiment", "opteq_theorem"]), 2, "Did you mean 'opteq_theorems'?")
    check_refused(capsys, cli.main(["experiment", "opteq_theorems", "--prest", "smoke"]), "--preset")


@pytest.mark.parametrize("code", [0, 1])
def test_an_experiment_runs_with_its_options_and_its_verdict(code, monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "run", lambda name, options: asked.append((name, options)) or code)
    assert cli.main(["experiment", "opteq_theorems", "--preset", "smoke", "--seed", "3"]) == code
    assert asked == [("opteq_theorems", experiments.Options(preset="smoke", seed=3))]


def test_a_cell_of_another_version_is_run_again(here, monkeypatch):
    def outcome():
        with ThreadPoolExecutor(1) as threads:
            return run_grid(grid_work.product, {"x": {"a": 2, "b": 3}}, here, executor=threads)["x"]

    assert [outcome().cached, outcome().cached] == [False, True]
    monkeypatch.setattr(opteq, "__version__", "another")
    assert [outcome().cached, outcome().cached] == [False, True]


def test_the_benchmarks_are_those_of_a_checkout(tmp_path, monkeypatch, capsys):
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr(bench.opteq, "__file__", str(root / "src" / "opteq" / "__init__.py"))
    check_error(capsys, cli.main(["bench"]), 2, "clone the repository")
    (root / "benchmarks" / "run.py").write_text("import sys; sys.exit(len(sys.argv))")
    asked = []
    done = subprocess.CompletedProcess([], 5)
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command) or done)
    assert cli.main(["bench", "--rounds", "1"]) == 5
    assert asked == [[sys.executable, str(root / "benchmarks" / "run.py"), "--rounds", "1"]]
