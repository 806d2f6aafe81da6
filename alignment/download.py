"""Download GSM8K into dataset/gsm8k/, or go on with a download that broke off.

uv run -m alignment.download
"""

from __future__ import annotations

from pathlib import Path

import tyro

from alignment.data.tasks import gsm8k
from alignment.system.errors import run_command


def main(folder: str = gsm8k.FOLDER, source: str = gsm8k.SOURCE) -> None:
    """Download GSM8K; a broken transfer goes on where it stopped.

    Args:
        folder: Where train.jsonl and test.jsonl go.
        source: Address of the folder that holds the two files.
    """
    gsm8k.download(Path(folder), source)
    print(f"GSM8K is in {folder}/")


if __name__ == "__main__":
    run_command(lambda: tyro.cli(main, use_underscores=True))
