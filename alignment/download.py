"""Download GSM8K into dataset/gsm8k/, or go on with a download that broke off.

uv run -m alignment.download
"""

from pathlib import Path

from alignment.args import DownloadArgs, parse
from alignment.system.errors import run_command


def main() -> None:
    args = parse(DownloadArgs)
    from alignment.data.tasks import gsm8k

    gsm8k.download(Path(args.folder), args.source)
    print(f"GSM8K is in {args.folder}/")


if __name__ == "__main__":
    run_command(main)
