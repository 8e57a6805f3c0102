"""A live page about runs: metrics, samples and tokens in a browser, read from run folders and never written to them.

    folder ──► reader (reader.py, index.py) ──► pages (pages.py) ──► server (server.py), or files (pages.py)

The page runs in a separate process and reads only files that the run writes anyway. A missing, older or damaged file becomes
a sentence on the page.
"""
