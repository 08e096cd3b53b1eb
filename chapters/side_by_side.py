"""Pages."""


def pages(files):
    return {}
