"""A service on a tiny model. Modules of this folder skip where the SDK is not installed."""

import pytest


@pytest.fixture(scope="session")
def bench(tiny_llama):
    from verl.cli.serve import serving_config
    from verl.tinker.workbench import Workbench

    return Workbench(serving_config(str(tiny_llama), ["actor_rollout_ref.actor.fsdp_config.dtype=float32"], rank=8))


@pytest.fixture(scope="module")
def served(bench, tmp_path_factory):
    from tests.tinker.served import running

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        with running(bench, tmp_path_factory.mktemp("served")) as served:
            yield served
