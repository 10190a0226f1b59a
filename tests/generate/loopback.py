"""A server in this process, and a tokenizer of bytes, for tests of generation."""

import http.client
import json
import threading
import time

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from panax.data.text.tokenizer import Tokenizer
from panax.generate.serving import ServedModel, create_app

END = "<|endoftext|>"


def byte_tokenizer(*special):
    """256 bytes, the end of a document, and special tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *special])
    return Tokenizer(backend, end_of_document=END)


class Running:
    """A server in a thread of this process."""

    def __init__(self, engine, tokenizer, key=None):
        self.engine = engine
        config = uvicorn.Config(create_app(ServedModel(engine, tokenizer, "tiny"), key=key), port=0, log_level="error")
        socket = config.bind_socket()
        self.port = socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self):
        self._server.should_exit = True
        self._thread.join()

    def send(self, path, body=None, headers=None, *, raw=None):
        """(status, body as text)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = raw if raw is not None else None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def ask(self, path, **body):
        status, text = self.send(path, body)
        assert status == 200, text
        return json.loads(text)

    def stream(self, path, **body):
        status, text = self.send(path, body | {"stream": True})
        assert status == 200 and text.endswith("data: [DONE]\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
