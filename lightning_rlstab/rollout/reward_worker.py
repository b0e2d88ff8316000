"""The worker process of a reward function with a time limit.

Imports nothing but the standard library and ``reward_functions``. Speaks pickled messages over its standard input and
output. What the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from lightning_rlstab.rollout.reward_functions import RewardAnswer, RewardError, answer_of, values_of

__all__ = ["main", "reply_to"]


def main() -> None:
    """Load the function, then answer requests until the parent closes the pipe."""
    requests, replies = _pipes()
    try:
        name, pickled, time_limit_seconds = requests.recv()
        func = pickle.loads(pickled)
    except Exception:  # whatever a user's function, or its packing, raises
        replies.send(("refused", traceback.format_exc()))
        return
    replies.send(("ready",))
    with asyncio.Runner() if hasattr(asyncio, "Runner") else _OldRunner() as runner:
        while True:
            try:
                request = requests.recv_bytes()
            except EOFError:
                return
            # The parent kills a hanging worker. Should the parent itself be gone by then, nobody would: this
            # watchdog needs neither the interpreter lock nor SIGALRM, which verifiers use for limits of their own.
            faulthandler.dump_traceback_later(10 + 2 * time_limit_seconds, exit=True)
            replies.send(reply_to(func, pickle.loads(request), name=name, runner=runner))
            faulthandler.cancel_dump_traceback_later()


class _OldRunner:
    """``asyncio.Runner`` for Python 3.10."""

    def __enter__(self) -> _OldRunner:
        self._loop = asyncio.new_event_loop()
        return self

    def run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def __exit__(self, *_: object) -> None:
        self._loop.close()


def _pipes() -> tuple[Connection, Connection]:
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a function that reads its input must not eat requests
    os.dup2(2, 1)
    os.close(null)
    sys.stdout = sys.stderr
    return Connection(requests, writable=False), Connection(replies, readable=False)


def reply_to(func: Any, kwargs: dict[str, Any], *, name: str, runner: Any) -> tuple[Any, ...]:
    """Call the function once.

    Args:
        func: The reward function.
        kwargs: Keywords of the call.
        name: The function's name, for errors.
        runner: Runs a coroutine to its end.

    Returns:
        ``("answer", values, extra_columns, metrics)``, ``("broken", message, row, value)`` for a broken contract, or
        ``("raised", pickled exception or None, traceback)``.
    """
    try:
        answer = answer_of(func, kwargs)
        if not isinstance(answer, RewardAnswer):
            answer = runner.run(answer)
        values = values_of(answer.values, function=name, rows=len(kwargs["prompts"]))
    except RewardError as error:
        return "broken", str(error), error.row, repr(error.value)
    except Exception as error:  # whatever a user's function, or its packing, raises
        return "raised", _pickled(error), traceback.format_exc()
    reply = ("answer", values, dict(answer.extra_columns), dict(answer.metrics))
    try:
        pickle.dumps(reply)
    except Exception:  # whatever a user's function, or its packing, raises
        return "broken", f"`{name}` must log plain values, got some that cannot be sent between processes.", None, None
    return reply


def _pickled(error: Exception) -> bytes | None:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # exceptions with constructors of their own often cannot be packed
        return None
    return packed


if __name__ == "__main__":
    main()
