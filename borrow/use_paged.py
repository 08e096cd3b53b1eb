"""Paged: a server admits, reads and writes texts step by step; those that begin alike share blocks of cache."""

import queue
import threading
from collections.abc import Collection

from borrow.my_gpt import model
from paged import PagedCache, Server

server = Server(model, PagedCache(model, n_blocks=64, block_size=16))  # 1,024 tokens for all texts
arrivals: queue.SimpleQueue = queue.SimpleQueue()


def serve() -> None:
    """Write all texts that arrive, in a thread that owns the server. Each answer's queue gets its tokens, and then
    None, or the error that ended it."""
    answers: dict[int, queue.SimpleQueue] = {}
    while True:
        try:
            while not server.busy or not arrivals.empty():
                *prompt, answers[server.n_arrived] = arrivals.get()
                server.add(*prompt)
            for number, token in server.step():
                answers[number].put(token)
        except Exception as error:  # such as logits that aren't finite, or memory that is full
            for text in [*server.texts]:
                server.cache.free(text)
                server.texts.remove(text)
            for answer in answers.values():
                answer.put(error)
        writing = {text.number for text in server.texts}
        for number in answers.keys() - writing:
            answers.pop(number).put(None)


def write(ids: list[int], n: int, stop_ids: Collection[int] = ()) -> list[int]:
    """Return up to n tokens after ids, which one of stop_ids ends; any thread may call this. Raises ValueError if the
    server can't hold them, and the error that befell the server, if any."""
    server.check(ids, n)  # here, and not in the server's thread
    if n == 0:
        return []
    answer: queue.SimpleQueue = queue.SimpleQueue()
    arrivals.put((ids, n, stop_ids, answer))
    new = []
    while (token := answer.get()) is not None:
        if isinstance(token, Exception):
            raise token
        new.append(token)
    return new


threading.Thread(target=serve, daemon=True).start()
if __name__ == "__main__":
    print(write([1, 2, 3], 20))
