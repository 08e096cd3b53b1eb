"""Ctrl-C while a script still imports PyTorch ends it at once, without a traceback.

A script imports this before anything else, and only where it is run; CommandLine.parse() lets its body clean up.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as in the background
    signal.signal(signal.SIGINT, signal.SIG_DFL)
