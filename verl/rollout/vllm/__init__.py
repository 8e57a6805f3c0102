"""vLLM as a rollout engine: in separate processes (`rollout.mode=async`, the default) or in the run's ranks (`sync`).

    trainer                                            vLLM
    engine.VLLMRollout ── prompts ──► core.Core ─────► LLMEngine.step ──► sample: our sampling on its logits
                       ◄─ samples as they end ──
                       ── buckets ──► core.Core ─────► weights.WeightReceiver ──► layerwise reload

`core.Core` lives in this process, or behind verl.rollout.process in another one; both answer the same calls. A lost process
comes back with its weights (process.py). verl.parallel.engine_plan decides the devices of a replica. The first rank
of a replica has its process, with a vLLM worker for each device. Or each rank is such a worker (library.Ranks).

vLLM computes logits. Tokens are sampled by verl.rollout.sampling with the uniforms of verl.rollout.uniforms, so that samples
equal the native engine's, except for the rounding of logits. All names of vLLM are in library.py.
"""
