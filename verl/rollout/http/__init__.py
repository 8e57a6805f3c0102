"""A service that generates over HTTP: SGLang, vLLM's server, or any OpenAI-compatible server that returns token ids.

    engine.HTTPRollout ── token ids ──► client.Client ──► the service's route (dialects.py) ──► token ids, log-probs
                       ── a folder of weights ──► the service's reload route ──► success or error

A request is one sample, and a sample is counted once, however often its request had to be repeated.
"""
