"""An engine in a separate process: answers, errors, silence and death."""

import os

import psutil
import pytest

from tests.forked import Forked
from tests.processes import is_alive, wait_until
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import DeadlineError, ModelError, WorkerLostError
from verl.rollout.process import EngineProcess


def process(call_timeout_s=20.0, **setup):
    return EngineProcess(
        "fake engine",
        "tests.rollout.fake_core:start",
        setup,
        environment={},
        start_timeout_s=60.0,
        call_timeout_s=call_timeout_s,
    )


@pytest.mark.usefixtures("forked_engines")
def test_calls_errors_and_silence():
    """A SIGTERM for every process of a run leaves the engine."""
    engine = process(call_timeout_s=1.6)
    psutil.Process(engine.pid).terminate()
    assert engine.call("add", 2, 3) == 5
    params = SamplingParams(stop=("x",))
    assert engine.call("add", [params], [PromptRequest(1, (2, 3))]) == [params, PromptRequest(1, (2, 3))]
    with pytest.raises(ModelError, match="This does not fit"):
        engine.call("refuse")
    said = r"fake engine process \(pid \d+\) was silent for 1.6 s during 'hang', .*it was in hang \(fake_core.py:\d+\)"
    with pytest.raises(DeadlineError, match=said):
        engine.call("hang")
    assert not is_alive(engine.pid)
    with pytest.raises(WorkerLostError, match="has ended"):
        engine.call("add", 1, 1)


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize(
    ("method", "words"),
    [("die", "SIGKILL .last line of its log: the last thing that was said. during 'die'"), ("stumble", "a bug")],
)
def test_an_engine_that_dies_is_named_at_once(method, words):
    engine = process(call_timeout_s=60.0)
    with pytest.raises(WorkerLostError, match=words):
        engine.call(method)
    assert not is_alive(engine.pid)


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_is_closed_has_ended_and_what_hinders_the_start_is_said():
    engine = process()
    engine.close()
    assert not is_alive(engine.pid)
    with pytest.raises(ModelError, match="It cannot start"):
        process(refuse=True)


def test_it_dies_with_its_parent(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import os\nfrom tests.rollout.test_process import process\n"
        "print(process().pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    pid = int(Forked(tmp_path / "parent.py", env=os.environ).stdout.readline())
    assert wait_until(lambda: not is_alive(pid))
