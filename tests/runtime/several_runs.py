"""`python -m tests.runtime.several_runs jobs.json`: training runs one after the other in one process or rank.

A job is {"overrides": [...], "program": "ppo", "has_scorers": False}. Several ranks all run the same jobs, each job at a
separate port. One start of Python serves many runs.
"""

import json
import sys
from pathlib import Path

from tests.runtime.ranks import scorers_of, take_port
from verl.config import PPO, SCHEMAS, load_config
from verl.errors import VerlError
from verl.run.host import train


def main(file):
    for number, job in enumerate(json.loads(Path(file).read_text())):
        take_port(f"{file}.port{number}")
        try:
            program = job.get("program", "ppo")
            schema = SCHEMAS.get(program, PPO)
            with scorers_of(job):
                train(load_config(job["overrides"], schema=schema, check=program in SCHEMAS), program)
        except VerlError as error:
            print(f"ERROR {type(error).__name__}: {error}", file=sys.stderr)
            if not job.get("may_fail"):
                raise


if __name__ == "__main__":
    main(sys.argv[1])
