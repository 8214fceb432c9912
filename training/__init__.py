"""Training script: settings, data, optimizer, loop and report.

`main` is the command line. `config` has the settings, `corpus` the data, `trainer` the model and
the train step, `plan` the predicted memory, `run` the loop, and `run_folder` the log and report.
"""
