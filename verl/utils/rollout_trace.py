"""Import path of verl.compat.tracing: decorators that trace nothing here."""

from verl.compat.tracing import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

__all__ = ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"]
