"""Reference of messages: collected from the syntax tree, and written as one page per room."""
