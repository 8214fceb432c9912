"""Training script: settings, data, optimizer, loop and report.

`main` is the command line. `config` has the settings, `plan` the model and predicted memory,
`corpus` the data, `trainer` the train step, `run` the loop, and `run_folder` the log and report.
"""
