"""Modes of users' workers: collect(split(x)) == x, for uneven sizes too, and modes that a script adds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.batches import Shape, make_batch, rows_of
from tests.parallel.test_dispatch import FLAT2, echo, rows, run
from verl.compat.dispatch import Dispatch, register, register_dispatch_mode
from verl.errors import ConfigError
from verl.parallel.dispatch import plan_call
from verl.parallel.mesh import Mesh
from verl.parallel.register import registered


class TestPlainModes:
    def test_rank_zero(self):
        plan, result = run(Dispatch.RANK_ZERO, FLAT2, lambda x: x, "only")
        assert (plan.ranks(), result) == ([0], "only")

    def test_modes_of_the_core(self):
        assert rows_of(run(Dispatch.ND_SCATTER_PROTO, FLAT2, echo, make_batch(5))[1]) == list(range(5))

    @pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
    def test_lists_for_each_rank(self, mode):
        assert run(mode, FLAT2, lambda a, b: (a, b), [1, 2], b=["x", "y"])[1] == [(1, "x"), (2, "y")]
        with pytest.raises(ValueError, match="2 ranks"):
            run(mode, FLAT2, lambda a: a, [1, 2, 3])

    @settings(max_examples=30, deadline=None)
    @given(num_rows=rows, size=st.integers(1, 5))
    def test_padding_comes_and_goes(self, num_rows, size):
        batch = make_batch(num_rows, _verl_auto_padding=True)
        shape = Shape(Mesh.flat(range(size)))
        plan, joined = run(Dispatch.DP_COMPUTE_PROTO, shape, echo, batch)
        assert len({len(call[0][0]) for call in plan.calls}) == 1
        assert rows_of(joined) == list(range(num_rows))

    def test_without_padding_rows_must_divide(self):
        with pytest.raises(ValueError, match="only support equal chunk"):
            run(Dispatch.DP_COMPUTE_PROTO, FLAT2, echo, make_batch(3))
        with pytest.raises(ValueError, match="DataProtos, not a int"):
            run(Dispatch.DP_COMPUTE_PROTO, FLAT2, echo, 3)

    def test_function_first(self):
        def work(func, batch):
            return func(batch)

        assert rows_of(run(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, FLAT2, work, echo, make_batch(4))[1]) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="first argument"):
            run(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, FLAT2, work, make_batch(4))

    def test_metrics_stay_apart(self):
        assert run(Dispatch.DP_COMPUTE_METRIC, FLAT2, len, make_batch(4))[1] == [2, 2]

    def test_direct_methods_have_no_group_call(self):
        with pytest.raises(ValueError, match="on its ranks"):
            run(Dispatch.DIRECT_ROLLOUT_METHOD, FLAT2, len)


class TestOwnModes:
    def test_functions_in_the_decorator(self):
        mode = {
            "dispatch_fn": lambda group, x: (([x + i for i in range(group.world_size)],), {}),
            "collect_fn": lambda group, outputs: outputs[::-1],
        }

        class Mine:
            @register(dispatch_mode=mode)
            def work(self, x):
                return x * 10

        declared = registered(Mine)["work"]
        plan = plan_call(declared, FLAT2, (1,), {})
        assert plan.collect([Mine().work(*call[0]) for call in plan.calls]) == [20, 10]
        with pytest.raises(ConfigError, match="collect_fn"):
            register(dispatch_mode={"dispatch_fn": len})

    def test_a_new_name(self):
        mode = register_dispatch_mode("EVERY_RANK_ITS_NUMBER", lambda g: (([0, 1],), {}), lambda g, out: sum(out))
        assert Dispatch.EVERY_RANK_ITS_NUMBER is mode
        assert run(mode, FLAT2, lambda number: number)[1] == 1
        with pytest.raises(ConfigError, match="exists already"):
            Dispatch.register("EVERY_RANK_ITS_NUMBER")
        with pytest.raises(AttributeError, match="ONE_TO_ALL"):
            _ = Dispatch.ONE_TO_AL

    def test_names_of_the_contract(self):
        names = {mode.name for mode in Dispatch}
        assert {
            "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC",
            "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
        } <= names  # fmt: skip
