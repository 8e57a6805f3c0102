"""A service on a tiny model. Modules of this folder skip if the SDK is not installed."""

import hashlib

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


@pytest.fixture(scope="module")
def shared(bench, tmp_path_factory):
    """A service with the tenants ada, bob (with limits) and an admin."""
    from tests.tinker.served import running
    from verl.parallel import connections
    from verl.tinker.tenants import Tenant, TenantLimits, Tenants

    people = {
        "tml-ada": Tenant("ada"),
        "tml-bob": Tenant("bob", limits=TenantLimits(models=2, rank=4, samplers=3, tokens=200)),
        "tml-ops": Tenant("ops", is_admin=True),
    }
    tenants = Tenants({hashlib.sha256(key.encode()).hexdigest(): tenant for key, tenant in people.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setattr(connections, "_LOOK_S", 0.5)
        with running(bench, tmp_path_factory.mktemp("shared"), tenants) as served:
            yield served
