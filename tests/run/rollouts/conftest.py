"""Files that the runs of this folder read."""

import pytest
from letters import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with prompts and a tokenizer."""
    folder = tmp_path_factory.mktemp("letters")
    write_files(folder)
    return folder
