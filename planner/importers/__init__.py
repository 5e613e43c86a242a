"""What other tools' job files mean: one file for each tool, with its keys, values, defaults and notes."""
