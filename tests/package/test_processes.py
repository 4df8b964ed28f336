"""vitamp.load(RUN).predict says what predict.py says; vitamp.train trains as the command line does."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import vitamp
from tests.program import ROOT, TINY_DIGITS, Vitamp, train_tiny
from tests.waiting import until
from vitamp.processes import Loaded, Prediction, _exception_of_failure, _path_of, _Predictor, _run, words_of


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three readable images, and one that is not, in a folder with an odd name."""
    folder = tmp_path_factory.mktemp("photos [1]")
    for number in range(3):
        shades = np.random.default_rng(number).integers(0, 255, (8 + number, 9, 3), np.uint8)
        Image.fromarray(shades).save(folder / f"ä {number}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(name="say")
def _say(request: pytest.FixtureRequest) -> Vitamp:
    """The program; here `vitamp` is the module."""
    return request.getfixturevalue("vitamp")


@pytest.fixture(scope="module")
def loaded(digits_run: Path) -> Loaded:
    return vitamp.load(digits_run)


def rows_of(predictions: list[Prediction]) -> list[dict[str, object]]:
    """As predict.py -format jsonl writes them."""
    rows = []
    for image, guesses, error in predictions:
        found = [{"class": one.name, "label": one.label, "probability": one.probability} for one in guesses]
        rows.append({"image": image, **({"error": error} if error else {"guesses": found})})
    return rows


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_predictions_are_those_of_predict_py(
    say: Vitamp, loaded: Loaded, digits_run: Path, photos: Path, tmp_path: Path, adapted: bool
) -> None:
    run = train_tiny(tmp_path, "MODEL.LORA.RANK=4", "-pretrained", digits_run) if adapted else digits_run
    model = vitamp.load(run) if adapted else loaded
    for flags, typed in (
        ({"topk": 2}, ["-topk", "2"]),
        ({"tta": "flip", "amp": "off"}, ["-tta", "flip", "-amp", "off"]),
    ):
        words = [run, photos, "-format", "jsonl", *typed]
        expected = say(*words, script="scripts/predict.py").expect(1).out.splitlines()
        assert len(expected) == 4
        assert rows_of(model.predict(photos, **flags)) == [json.loads(line) for line in expected]


def test_images_in_memory_are_predicted_like_their_files(loaded: Loaded, photos: Path) -> None:
    paths = sorted(photos.glob("ä*.png"))
    opened = [Image.open(path) for path in paths]
    files, held = loaded.predict(paths), loaded.predict(opened)
    assert [one.image for one in held] == ["0", "1", "2"]
    assert [one.guesses for one in held] == [one.guesses for one in files]
    assert loaded.predict(np.asarray(opened[1]))[0].guesses == files[1].guesses
    assert loaded.predict([paths[0], paths[0]]) == [files[0], files[0]]


def test_images_in_memory_keep_what_they_hold(tmp_path: Path) -> None:
    turned = Image.new("RGB", (2, 3))
    turned.getexif()[0x0112] = 6
    assert Image.open(_path_of(turned, tmp_path / "turned")).getexif()[0x0112] == 6
    for mode, kept in (("PA", "RGBA"), ("CMYK", "RGB"), ("I;16", "I;16")):
        assert Image.open(_path_of(Image.new(mode, (2, 3)), tmp_path / mode)).mode == kept
    for stored in (np.full((2, 3), 1000, np.uint16), np.zeros((2, 3, 5), np.uint8)):
        assert np.array_equal(np.load(_path_of(stored, tmp_path / "stored")), stored)
    with pytest.raises(TypeError, match="ndarray: an image is a path"):
        _path_of(np.array([["photo.jpg"]]), tmp_path / "text")


def test_flags_are_typed_as_on_the_command_line() -> None:
    flags = {"amp": True, "out": Path("a"), "tta": False, "device": None, "to": ("a", "b"), "X": [1, 2], "Y": False}
    assert [*words_of(flags)] == ["-amp", "-out", "a", "-to", "a,b", "X=[1, 2]", "Y=false"]
    assert [*words_of({"amp": False})] == ["-amp", "off"]


def test_a_failed_process_is_an_exception_with_its_last_words() -> None:
    assert repr(_exception_of_failure(2, "a note\nerror: -x: no such flag.\n")) == "ValueError('-x: no such flag.')"
    assert repr(_exception_of_failure(1, "internal error: 3\nerror: disk full\n")) == "RuntimeError('disk full')"
    assert str(_exception_of_failure(-9, "epoch 1")) == "the process was ended by signal 9"
    assert str(_exception_of_failure(1, "Traceback")) == "Traceback"


def test_a_relative_path_means_the_current_folder(
    loaded: Loaded, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        Image.open(photos / f"ä {number}.png").save(tmp_path / str(number) / "one.png")
        monkeypatch.chdir(tmp_path / str(number))
        assert loaded.predict("one.png")[0].guesses == loaded.predict(photos / f"ä {number}.png")[0].guesses


def test_after_its_process_was_killed_the_next_call_starts_another(loaded: Loaded, photos: Path) -> None:
    before = loaded.predict(photos)
    assert loaded.predict([]) == []
    assert loaded._predictor is not None
    loaded._predictor._process.kill()
    loaded._predictor._process.wait()
    assert loaded.predict(photos) == before
    assert pickle.loads(pickle.dumps(loaded)).predict(photos) == before  # noqa: S301
    cmyk = Image.open(photos / "ä 0.png").convert("CMYK")
    assert loaded.predict([cmyk])[0].guesses
    with pytest.raises(TypeError, match="NoneType: an image is a path") as raised:
        loaded.predict([cmyk, None])
    assert raised.value.__notes__ == ["It is number 1 of the images that were given."]


def test_the_answer_of_an_interrupted_question_is_not_taken_for_the_next(
    loaded: Loaded, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = sorted(photos.glob("ä*.png"))
    expected, predictor = loaded.predict(second), loaded._predictor
    assert predictor is not None
    with monkeypatch.context() as patch:
        patch.setattr(predictor._process, "stdout", SimpleNamespace(readline=lambda: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            loaded.predict(first)
    assert loaded.predict(second) == expected


def test_a_damaged_image_in_memory_has_an_error_like_a_damaged_file(loaded: Loaded) -> None:
    written = io.BytesIO()
    Image.effect_noise((64, 64), 99).save(written, "jpeg")
    cut, whole = Image.open(io.BytesIO(written.getvalue()[:900])), Image.new("L", (8, 8))
    closed = whole.copy()
    closed.close()
    first, *broken, last = loaded.predict([whole, cut, closed, np.zeros((0, 8), np.uint8), whole])
    assert (first.error, last) == ("", first._replace(image="4"))
    errors = ["image file is truncated", "Operation on closed image", "cannot write empty image"]
    assert [one.error.partition(" (")[0] for one in broken] == errors
    assert [(one.image, one.guesses) for one in broken] == [(number, []) for number in "123"]


def test_a_predictor_ends_its_process(digits_run: Path) -> None:
    predictor = _Predictor([str(digits_run)])
    process = predictor._process
    del predictor
    assert process.wait(30) == -signal.SIGKILL


def test_the_interrupt_of_a_terminal_does_not_reach_the_program_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("import os; print(os.getpgrp() == os.getpid())")
    monkeypatch.setattr("vitamp.processes.PROGRAM", tmp_path)
    _run("own.py", [])
    assert capsys.readouterr().out == "True\n", "Ctrl-C goes to the caller's group; it would come twice"


def test_threads_that_end_share_one_process(loaded: Loaded, photos: Path) -> None:
    """Linux ends a process with the thread that started it."""
    loaded._predictor = None
    answers, processes = list[list[Prediction]](), set[int]()

    def ask() -> None:
        answers.append(loaded.predict(photos))
        assert loaded._predictor is not None
        processes.add(loaded._predictor._process.pid)

    for number in (1, 2):
        threads = [Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 2 * number
    assert answers[1:] == answers[:-1]
    assert len(processes) == 1


def test_a_stopped_process_is_killed_and_named(loaded: Loaded, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.predict(photos)
    monkeypatch.setattr("vitamp.processes.SECONDS_STOPPED", 1)
    assert loaded._predictor is not None
    os.kill(loaded._predictor._process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"was stopped \(SIGSTOP\) for 1 s, so it was killed"):
        loaded.predict(photos)


def test_a_wrong_question_is_an_exception_and_the_next_is_answered(loaded: Loaded, photos: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.png: no such file or folder"):
        loaded.predict("none.png")
    with pytest.raises(ValueError, match="-tta flap: takes flip"):
        loaded.predict(photos, tta="flap")
    assert len(loaded.predict(photos)) == 4


NONSENSE = (
    *(b"", b"\xff\xfe", b"\x00", b"NaN", b"[1e999]", b"1" * 5001, b"[" * 100_000, b'["-"]', b'["a\\u0000b"]'),
    *(b'["\\ud800"]', b'["\xff.png"]', b'["", ""]', b'["[a"]', b'[["a"]]', b'["' + b"a/" * 9999 + b'"]', b"[]"),
)
"""Requests that name no image"""


def test_serve_answers_every_line(say: Vitamp, digits_run: Path, photos: Path, tmp_path: Path) -> None:
    result = say(digits_run, photos, "-serve", script="scripts/predict.py")
    assert f"-serve: standard input names the images; leave {photos} out." in result.expect(2).err
    sparse = tmp_path / "sparse.jpg"
    with sparse.open("wb") as file:
        file.truncate(2**36)
    os.mkfifo(tmp_path / "pipe.png")
    odd = [str(sparse), str(tmp_path / "pipe.png"), "/dev/zero", "/dev/random", "/proc/self/pagemap", "/proc/version"]
    process = subprocess.run(
        [sys.executable, ROOT / "scripts/predict.py", digits_run, "-serve"],
        input=b"\n".join([b"{}", b"no json", *NONSENSE, json.dumps(odd).encode(), json.dumps([str(photos)]).encode()]),
        capture_output=True,
        check=True,
    )
    first, second, *wrong, each, last = map(json.loads, process.stdout.splitlines())
    assert first == {"error": "{}: is no list of names of images."}
    assert second == {"error": "no json: is no list of names of images."}
    assert [[*one] for one in wrong] == [["error"]] * len(NONSENSE)
    assert [row["image"] for row in each if "error" in row] == odd
    assert len(last) == 4


def test_training_returns_the_run(tmp_path: Path, photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY_DIGITS, encoding="utf-8")
    run = vitamp.train(recipe, epochs=1, device="cpu", output=tmp_path / "run", SEED=1)
    assert run.folder == tmp_path / "run"
    assert [row["event"] for row in run.metrics if row["event"] == "val"]
    assert len(run.predict(photos)) == 4
    assert run.report().is_file()
    again = vitamp.train(recipe, epochs=1, device="cpu", output=tmp_path / "run", resume="auto", SEED=1)
    assert again.folder == run.folder, "it had finished"
    capfd.readouterr()
    with pytest.raises(ValueError, match="this command trained nothing"):
        vitamp.train(recipe, device="cpu", dry_run=True)
    with pytest.raises(ValueError, match=r"^-epochs: TRAIN.NUM_EPOCHS: expected whole number >= 0 or auto, got -1\.$"):
        vitamp.train(recipe, epochs=-1)
    assert "error: -epochs: TRAIN.NUM_EPOCHS: expected" in capfd.readouterr().out, "it is shown as it comes"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_training_is_saved_when_it_or_its_caller_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    script = "import vitamp; vitamp.train('tiny.yaml', epochs=10000, device='cpu', output='run')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and "train" in metrics.read_text(encoding="utf-8"), 120)
    process.send_signal(number)
    assert ("KeyboardInterrupt" in process.communicate(timeout=120)[1]) == (number == signal.SIGINT)
    until(lambda: '"paused"' in metrics.read_text() and [*(tmp_path / "run/checkpoints").glob("step-*")] != [], 60)
