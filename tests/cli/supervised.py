"""`verl train` with a stand-in for training: `python -m tests.cli.supervised KIND key=value ...`; needs no torch."""

import os
import pdb
import signal
import subprocess
import sys
import time
from pathlib import Path

import verl.cli.train
from verl.cli.main import run_verb
from verl.errors import ConfigError, InterruptedRun, WorkerLostError
from verl.tracking.heartbeat import Heartbeat


class Work:
    """One attempt of a run: `kind` names the method that is the training."""

    def __init__(self, kind, loaded):
        self.trainer = loaded.config.trainer
        self.folder = Path(self.trainer.default_local_dir)
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        with (self.folder / "attempts").open("a") as file:
            file.write(f"{os.getpid()} {self.trainer.resume_mode} {self.trainer.resume_from_path}\n")
        self.attempt = len((self.folder / "attempts").read_text().splitlines())
        self.heart = Heartbeat(self.folder)
        self.heart.start()
        self.train = getattr(self, kind)

    def die(self, step, number=signal.SIGKILL):
        self.heart.begin_step(step)
        self.heart.phase("gen")
        os.kill(os.getpid(), number)

    def save(self, step):
        saved = self.folder / f"global_step_{step}"
        saved.mkdir()
        (saved / "manifest.json").write_text("{}")

    def good(self):
        print("trained", sys.stdin.readline().strip())
        return 0

    def killed_once(self):
        if self.attempt == 1:
            self.die(3)
        return 0

    def saves_and_dies(self):
        if self.attempt < 6:
            self.save(self.attempt)
            self.die(self.attempt + 1, signal.SIGSEGV)
        return 0

    def is_asked_early(self):
        self.die(0, signal.SIGTERM)

    def always_killed(self):
        self.die(2)

    def killed_elsewhere(self):
        self.die(self.attempt)

    def bad_input(self):
        raise ConfigError("A key is wrong. Set another.")

    def loses_a_rank(self):
        self.heart.begin_step(4)
        raise WorkerLostError(f"Rank 1 (process {os.getpid()}) died. Look at its log.")

    def loses_its_folder(self):
        self.heart.begin_step(2)
        enough = self.looks_of_supervisor() + 3
        while self.looks_of_supervisor() < enough:  # it may not have seen the folder
            time.sleep(0.01)
        self.folder.rename(self.folder.with_name("moved"))
        self.folder.mkdir()
        self.die(3)

    @staticmethod
    def looks_of_supervisor():
        """Times that the supervisor has waited, as it does between two looks at the run."""
        status = Path(f"/proc/{os.getppid()}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def bug_once(self):
        if self.attempt == 1:
            raise ZeroDivisionError("in the deep")
        return 0

    def stops_when_asked(self):
        heard = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, frame: heard.append(signal.Signals(n).name))
        self.heart.begin_step(1)
        print("READY", flush=True)
        print("read", sys.stdin.readline().strip(), flush=True)
        while not heard:
            time.sleep(0.01)
        time.sleep(0.15)  # a second signal would be handled
        raise InterruptedRun(f"Stopped by {' and '.join(heard)}.")

    def hangs(self):
        """In the writing of a file, as on a network disk that has gone away."""
        os.mkfifo(self.folder / f"fifo-{self.attempt}")
        self.heart.begin_step(2)
        self.write_checkpoint(self.folder / f"fifo-{self.attempt}")

    def write_checkpoint(self, file):
        self.heart.phase("save_checkpoint")
        file.open("wb")

    def at_a_breakpoint(self):
        """The heart beats on a command to the debugger."""
        self.heart.end()
        (self.folder / "heartbeat.json").unlink()
        pdb.set_trace()
        return 0

    def loses_its_raylet(self):
        """As Ray ends a process after its raylet; the name of a process may be set by itself."""
        if self.attempt == 1:
            self.heart.begin_step(2)
            named = "import ctypes, os; ctypes.CDLL(None).prctl(15, b'raylet', 0, 0, 0); os.kill(os.getpid(), 9)"
            raylet = subprocess.Popen([sys.executable, "-c", named])
            os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
            os._exit(1)
        return 0

    def dies_behind_its_end(self):
        """As Ray ends a process without a cluster, after the run has closed its folder."""
        self.heart.begin_step(2)
        if (self.folder / "fails").exists():  # a run that fails has no summary
            (self.folder / "fails").unlink()
        else:
            (self.folder / "summary.json").write_text("{}")
        self.heart.phase("ended")
        os._exit(1)

    def leaves_children(self):
        if self.attempt == 1:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (self.folder / "child").write_text(str(child.pid))
            self.die(1)
        return 0


if __name__ == "__main__":
    kind, *overrides = sys.argv[1:]
    verl.cli.train._train = lambda loaded, restarted=False: Work(kind, loaded).train()
    raise SystemExit(run_verb("train", overrides, whole_process=True))
