"""Companions of a tokenizer.json: the special tokens by role, the chat template, and generation settings."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from panax.core.errors import DataError, RecipeError, describe_type

from ...system import json_reader
from ..files.files import decode_utf8, read_bytes

CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
_ROLES_FILE = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_OTHER_TEMPLATES = "additional_chat_templates"
_ROLES = ("bos", "eos", "pad")
_OF_A_MACHINE = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")
"""Keys that name files of the machine that made a tokenizer."""


@dataclasses.dataclass(frozen=True)
class TokenizerCompanions:
    """Files next to a tokenizer.json, which change no ids.

    Attributes:
        config: Content of tokenizer_config.json, and of the older special_tokens_map.json.
        template: The chat template, if it has a separate file.
        generation: Content of generation_config.json.
        other_templates: Templates in separate files, by name, such as "tool_use".
        answer_ends: Further ids at which generation stops, with which a chat template ends answers.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str | None = None
    generation: Mapping[str, Any] | None = None
    other_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    answer_ends: tuple[int, ...] = ()

    def token(self, role: str) -> str | None:
        """Return the token of a role: "bos", "eos" or "pad"."""
        token = self.config.get(f"{role}_token")
        if isinstance(token, dict):  # older files hold the complete added token
            token = token.get("content")
        return token if isinstance(token, str) else None

    def ids(self, vocabulary: Mapping[str, int]) -> dict[str, int | None]:
        """Return `bos_token_id`, `eos_token_id` and `pad_token_id`; None for a missing token."""
        return {f"{role}_token_id": vocabulary.get(self.token(role) or "") for role in _ROLES}

    def set_end_token(self, end: str, start: Sequence[str]) -> "TokenizerCompanions":
        """Return a copy with `end` as the end of a text, and, if no beginning is named, with the single token
        of `start`."""
        config = {key: value for key, value in self.config.items() if key not in _OF_A_MACHINE}
        if config.pop("auto_map", None) is not None:  # names Python files, which are not copied
            config.pop("tokenizer_class", None)
        if self.token("eos") != end:
            config["eos_token"] = end
        if self.token("bos") is None and len(start) == 1:
            config["bos_token"] = start[0]
        return dataclasses.replace(self, config={"tokenizer_class": "PreTrainedTokenizerFast", **config})

    def files(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the files, with special tokens' ids taken from the vocabulary."""
        if self.other_templates:
            # In one place, as files in a folder of their own are no attachments of a checkpoint.
            named = [{"name": name, "template": template} for name, template in self.chat_templates().items()]
            yield CONFIG, _json({**self.config, "chat_template": named})
        else:
            yield CONFIG, _json(self.config)
            if self.template is not None:
                yield _TEMPLATE, self.template
        if self.generation is not None or self.answer_ends:
            yield GENERATION, _json(self._generation(self.ids(vocabulary)))

    def role_tokens(self) -> dict[str, str]:
        """Return the special tokens by their keys in tokenizer_config.json: `bos_token` and so on."""
        tokens = {key: self.token(key.removesuffix("_token")) for key in self.config if key.endswith("_token")}
        return {key: token for key, token in tokens.items() if token is not None}

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name; most tokenizers have one, "default"."""
        stored = self.config.get("chat_template")
        named: dict[str, str] = {"default": stored} if isinstance(stored, str) else {}
        for each in stored if isinstance(stored, list) else ():
            if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str):
                named[each["name"]] = each["template"]
        named |= self.other_templates
        return named if self.template is None else {**named, "default": self.template}

    def end_ids(self) -> tuple[int, ...]:
        """Return the ids at which generation stops, in addition to the end of a document."""
        ends = self.generation.get("eos_token_id") if self.generation else None
        listed = ends if isinstance(ends, list) else [ends]
        return (*(each for each in listed if isinstance(each, int) and not isinstance(each, bool)), *self.answer_ends)

    def with_chat(self, template: str, answer_ends: Sequence[int]) -> "TokenizerCompanions":
        """Return a copy with this chat template, unless the tokenizer has it already, and with these ends of answers."""
        ends = tuple(dict.fromkeys([*self.answer_ends, *answer_ends]))
        if template in self.chat_templates().values():
            return dataclasses.replace(self, answer_ends=ends)
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        return dataclasses.replace(self, config=config, template=template, other_templates={}, answer_ends=ends)

    def _generation(self, ids: Mapping[str, int | None]) -> dict[str, Any]:
        ends = self.generation.get("eos_token_id") if self.generation else None
        listed = ends if isinstance(ends, list) and ids["eos_token_id"] in ends else [ids["eos_token_id"]]
        listed = list(dict.fromkeys([*listed, *self.answer_ends]))
        known = {key: value for key, value in ids.items() if value is not None}
        return {**(self.generation or {}), **known, **({"eos_token_id": listed} if len(listed) > 1 else {})}


def read_companions(folder: Path) -> TokenizerCompanions:
    """Read the companion files of a tokenizer's folder.

    Raises:
        DataError: A file is broken.
    """
    roles, config = _object(folder / _ROLES_FILE) or {}, _object(folder / CONFIG) or {}
    template = folder / _TEMPLATE
    # There, older files hold complete added tokens, in a form that tokenizer_config.json does not use.
    contents = {
        role: token["content"] if isinstance(token, dict) and "content" in token else token
        for role, token in roles.items()
    }
    return TokenizerCompanions(
        {**contents, **config},
        _text(template) if template.is_file() else None,
        _object(folder / GENERATION),
        {path.stem: _text(path) for path in sorted((folder / _OTHER_TEMPLATES).glob("*.jinja"))},
    )


def _text(path: Path) -> str:
    return decode_utf8(read_bytes(path), str(path))


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json_reader.parse(decode_utf8(read_bytes(path), str(path)))
    except ValueError as error:
        raise DataError(f"{path} is broken ({error}); expected a JSON object: repair or remove it") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{path} is broken (it holds {describe_type(value)}); expected a JSON object: repair or remove it"
        )
    return value


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def start_token_ids(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer's post-processor puts before a text."""
    if backend.post_processor is None:
        return ()
    for text in ("a", "0", " ", *backend.get_vocab(with_added_tokens=False)):
        encoding = backend.encode(text, add_special_tokens=True)
        if 0 in encoding.special_tokens_mask:
            return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
    return ()


def strip_start_tokens(text: str, where: str) -> str:
    """Return a tokenizer.json with a post-processor that puts nothing before a text.

    Raises:
        RecipeError: The post-processor is not a template.
    """
    content = json_reader.parse(text)

    def stripped(processor: Any) -> Any:
        kind = processor.get("type") if isinstance(processor, dict) else None
        if kind == "Sequence":
            return {**processor, "processors": [stripped(each) for each in processor["processors"]]}
        if kind == "TemplateProcessing":
            parts = {name: processor[name] for name in ("single", "pair")}
            return processor | {name: _from_first_sequence(pieces) for name, pieces in parts.items()}
        if kind in ("BertProcessing", "RobertaProcessing"):
            raise RecipeError(
                f"add_bos=False: {where} puts its first token before a text with a {kind}, which can't omit it; "
                f"expected a TemplateProcessing. Set add_bos=True"
            )
        return processor

    return json.dumps({**content, "post_processor": stripped(content.get("post_processor"))}, ensure_ascii=False)


def _from_first_sequence(pieces: list[Any]) -> list[Any]:
    first = next((place for place, piece in enumerate(pieces) if "Sequence" in piece), 0)
    return pieces[first:]
