"""What a training run needs besides the optimizer: text, batches and a report.

Nothing here knows of ZeRO or of the models; `train.py` puts the parts together.
Each module stands alone: `text` reads and measures, `data` makes batches, `report` writes down.
"""
