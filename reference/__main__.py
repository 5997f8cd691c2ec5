"""The child process: a request on standard input, messages on standard output, llama.cpp's log on the error."""

import ctypes
import os
import signal
import sys

import msgspec

from tracediff.errors import TracediffError
from tracediff_reference.protocol import DescribeRequest, Message, Request

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Run one request; 0 when it is done."""
    _belong_to_the_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request | DescribeRequest)
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is log, not message

    def send(message: Message) -> None:
        messages.write(msgspec.json.encode(message) + b"\n")
        messages.flush()

    # A quantised cache has Q and K multiplied with a Hadamard matrix first (llama-kv-cache.cpp), which would
    # record rotated scores under the names of plain ones.
    os.environ.setdefault("LLAMA_ATTN_ROT_DISABLE", "1")
    try:
        from tracediff_reference.capture import write_description
        from tracediff_reference.engine import trace
    except (AttributeError, OSError, RuntimeError) as error:  # another build, of --llama-lib
        send(Message(error=f"llama.cpp cannot be loaded: {error}. Leave --llama-lib out, or name another folder."))
        return 2
    try:
        if isinstance(request, DescribeRequest):
            write_description(request)
        else:
            trace(request, send)
    except TracediffError as error:
        send(Message(error=str(error)))
        return 2
    return 0


def _belong_to_the_parent() -> None:
    """Leave signals to the parent, which ends this process and then sees to its files; never outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    sys.exit(main())
