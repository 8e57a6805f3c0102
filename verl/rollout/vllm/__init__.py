"""vLLM as a rollout engine: in this process (`rollout.mode=sync`) or in a process of its own (`async`, the default).

    trainer                                            vLLM
    engine.VLLMRollout ── prompts ──► core.Core ─────► LLMEngine.step ──► draw.Draws: our draw on its logits
                       ◄─ samples as they end ──
                       ── buckets ──► core.Core ─────► weights.WeightReceiver ──► layerwise reload ──► what it got

`core.Core` lives in this process, or behind verl.rollout.process in another one; both answer the same calls. A process that is
lost comes back with its weights (rebuild.py). Several ranks have a Core each, or one together (library.Ranks). vLLM computes
logits; tokens are drawn by verl.rollout.sampling with the uniforms of verl.rollout.random, so that samples are those of the
native engine, but for the rounding of logits. All names of vLLM are in library.py.
"""
