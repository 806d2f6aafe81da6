"""A tracker: a CSV file of a run's numbers, one a line, for a spreadsheet."""

import csv

from alignment.runs.trackers import Tracker


def open_csv(folder, run_id, arguments):
    """The run's folder, its id, which a resumed run keeps, and the arguments of its args.json."""
    file = (folder / "numbers.csv").open("a", newline="")
    writer = csv.writer(file)

    def log(step, numbers, sample):
        writer.writerows((run_id, step, name, value) for name, value in numbers.items())
        # only what is on the disk has arrived, if the run is killed
        file.flush()

    return Tracker(log, file.close)
