"""Records that can't be used: counted, written down and skipped up to a limit, also where the tokens are in the cache."""

import dataclasses
import json

import pytest

from panax.core import DataError, RecipeError
from panax.data import (
    BadRecord,
    BytePairTokenizer,
    Document,
    FilteredCorpus,
    RecordLimits,
    TextData,
    TextFiles,
    open_tokens,
    write_tokens,
)

TOKENIZER = BytePairTokenizer(vocab_size=260)


@dataclasses.dataclass(frozen=True)
class Torn:
    """Twenty documents, with bad records after some of them."""

    bad: int = 3

    def documents(self):
        for i in range(20):
            yield Document(f"document number {i} " * (i + 1))
            if i < self.bad:
                yield BadRecord(f"torn.jsonl, line {2 * i + 2}", "broken JSON; repair it")

    def fingerprint(self) -> str:
        return f"torn-{self.bad}"


@pytest.fixture
def data(tmp_path) -> TextData:
    return TextData(
        corpus=Torn(), tokenizer=TOKENIZER, sequence_length=32, batch_size=2, cache_dir=str(tmp_path / "cache")
    )


def test_by_default_the_first_bad_record_is_an_error_that_names_it(data):
    with pytest.raises(DataError, match=r"^torn\.jsonl, line 2: broken JSON; repair it$"):
        data.open()
    with pytest.raises(DataError, match="line 2: broken JSON"):
        TOKENIZER.train(Torn())


def test_up_to_the_limit_they_are_skipped_counted_and_written_down(data, tmp_path):
    told = []
    opened = dataclasses.replace(data, max_bad_records=3).open(progress=lambda *event: told.append(event))
    store = opened.training_documents.store
    assert (len(store.offsets) - 1, store.num_bad_records) == (20, 3)
    (listed,) = (tmp_path / "cache").glob("tokens-*/bad_records.jsonl")
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert lines[2] == {"where": "torn.jsonl, line 6", "reason": "broken JSON; repair it"} and len(lines) == 3
    what, documents, tokens = told[-1]
    assert what.startswith("3 bad records skipped") and str(listed) in what and "line 2: broken JSON" in what
    assert (documents, tokens) == (20, len(store.tokens))


def test_more_than_the_limit_are_an_error_that_names_the_first(data):
    says = (
        r"3 or more bad records, where max_bad_records=2; the first: torn\.jsonl, line 2: broken .* line 4: .* line 6"
    )
    with pytest.raises(DataError, match=says):
        dataclasses.replace(data, max_bad_records=2).open()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_limit_holds_for_tokens_from_the_cache_too(data, limit):
    dataclasses.replace(data, max_bad_records=5).open()
    with pytest.raises(
        DataError, match=rf"3 or more bad records, where max_bad_records={limit}; the first: torn\.jsonl"
    ):
        dataclasses.replace(data, max_bad_records=limit).open()


def test_skipping_changes_no_token_of_the_others(data, tmp_path):
    clean = dataclasses.replace(data, corpus=Torn(bad=0), cache_dir=str(tmp_path / "other")).open()
    torn = dataclasses.replace(data, max_bad_records=3).open()
    assert clean.training_documents.fingerprint == torn.training_documents.fingerprint


def test_too_long_documents_are_bad_records(data):
    limited = dataclasses.replace(data, corpus=Torn(bad=0), max_characters=300)
    with pytest.raises(DataError, match=r"document 16: 304 characters; expected at most max_characters=300"):
        limited.open()
    store = dataclasses.replace(limited, max_bad_records=9).open().training_documents.store
    assert (len(store.offsets) - 1, store.num_bad_records) == (15, 5)
    # Another limit is another corpus, also for the cache.
    assert len(dataclasses.replace(data, corpus=Torn(bad=0)).open().training_documents.store.offsets) - 1 == 20


def test_a_filter_leaves_documents_out_and_counts_them(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in {"a": "short", "b": "keep this one", "c": "keep this, draft", "d": "none of it"}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    plain = TextFiles(paths=(str(tmp_path / "texts"),))
    corpus = FilteredCorpus(corpus=plain, min_characters=6, keep="keep|none", drop="draft")
    assert [document.text for document in corpus.documents()] == ["keep this one", "none of it"]
    write_tokens(corpus, TOKENIZER.train(plain), tmp_path / "out")
    store = open_tokens(tmp_path / "out")
    assert (len(store.offsets) - 1, store.num_filtered_documents, store.num_bad_records) == (2, 2, 0)
    assert corpus.fingerprint() != dataclasses.replace(corpus, drop="").fingerprint() != plain.fingerprint()
    with pytest.raises(DataError, match="all 4 of its documents are removed by the filter"):
        write_tokens(FilteredCorpus(corpus=plain, max_characters=1), TOKENIZER.train(plain), tmp_path / "none")


def test_a_filter_passes_bad_records_on(tmp_path):
    corpus = FilteredCorpus(corpus=Torn(), min_characters=100)
    with pytest.raises(DataError, match="line 2: broken JSON"):
        write_tokens(corpus, TOKENIZER.train(Torn(bad=0)), tmp_path / "none")
    write_tokens(corpus, TOKENIZER.train(Torn(bad=0)), tmp_path / "out", limits=RecordLimits(max_bad_records=3))
    store = open_tokens(tmp_path / "out")
    assert (store.num_bad_records, store.num_filtered_documents) == (3, 5)


def test_token_files_of_earlier_versions_have_none(make_store, tmp_path):
    make_store([[1, 2]])
    (header,) = tmp_path.glob("*/header.json")
    fields = json.loads(header.read_text())
    for name in ("num_bad_records", "num_filtered_documents", "checksums", "seal"):
        del fields[name]
    header.write_text(json.dumps(fields))
    assert open_tokens(header.parent).num_bad_records == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep": "("}, r"keep='\(' is not a regular expression"),
        ({"max_characters": 0}, "max_characters=0"),
        ({"min_characters": 5, "max_characters": 4}, "max_characters=4; expected at least 1 and min_characters=5"),
    ],
)
def test_filters_that_can_not_be_are_refused(wrong, says):
    with pytest.raises(RecipeError, match=says):
        FilteredCorpus(**({"corpus": TextFiles(paths=("x",))} | wrong))


@pytest.mark.parametrize(("name", "value"), [("max_characters", 0), ("max_bad_records", -1)])
def test_limits_that_can_not_be_are_refused(data, name, value):
    with pytest.raises(RecipeError, match=f"{name}={value}; expected at least"):
        dataclasses.replace(data, **{name: value})
