"""What the commands of `dragoman` do; `app.__main__` parses their options and imports them on demand."""
