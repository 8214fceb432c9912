"""What a training run needs besides ZeRO: settings, text, batches, optimizers and a report.

`config` is the command line, `plan` what it comes to and costs; `text` and `entropy` read and
measure, `data` makes batches, `optimizers` builds what updates the parameters, `report` writes
down and `show` prints. `train.py` puts the parts together.
"""
