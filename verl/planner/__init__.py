"""Plans of runs: placement, layout, time and memory, by one cost model. Without torch.

shape = ModelShape.from_config(json.load(open("config.json")))
cluster = Cluster.of("h100_sxm", num_devices=64)
memory(shape, ParallelLayout(data=8, tensor=8), tokens=4096, sequence=4096)         bytes of a device, by part
time_train(shape, ParallelLayout(data=8, tensor=8), cluster, SequenceBatch.equal(512, 4096))
time_generate(shape, EngineLayout(replicas=32, tensor=2), cluster, workload)
"""

from verl.models.memory import Bytes, ParallelLayout, memory
from verl.models.shapes import ModelShape, known_shape, known_shapes
from verl.planner.cluster import Cluster, DeviceGroup
from verl.planner.generation import (
    EngineLayout,
    decode_step,
    forward_memory,
    generation_memory,
    time_generate,
    time_transition,
)
from verl.planner.options import Space
from verl.planner.search import Rules, RunPlan, search
from verl.planner.simulate import Conditions, SimulatedRun, simulate
from verl.planner.step_time import Time, time_forward, time_train
from verl.planner.workload import Dataflow, Lengths, SequenceBatch, Workload

__all__ = [
    "Bytes", "Cluster", "Conditions", "Dataflow", "DeviceGroup", "EngineLayout", "Lengths", "ModelShape",
    "ParallelLayout", "Rules", "RunPlan", "SequenceBatch", "SimulatedRun", "Space", "Time", "Workload",
    "decode_step", "forward_memory", "generation_memory", "known_shape", "known_shapes", "memory", "search",
    "simulate", "time_forward", "time_generate", "time_train", "time_transition",
]  # fmt: skip
