"""Makes the pages of the reference from the code. Each module has one function, `page`, which returns Markdown."""
