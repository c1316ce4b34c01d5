"""The flow of rows: scan, repair and write logs, in one process or several."""
