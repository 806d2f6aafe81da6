"""Texts that Jinja templates make."""

from pathlib import Path


def fill_template(file: Path, **facts: object) -> str:
    """The text that a Jinja template makes of `facts`. A fact that it uses and does not get is an
    error. It may include other templates of its folder.

    In HTML, facts are escaped. A line with nothing but a block tag ({% if %}) makes no line of the
    text, except in plain-text templates (.txt.j2), which control line breaks themselves."""
    import jinja2  # here, because few commands fill a template

    is_plain_text = ".txt." in file.name
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=not is_plain_text,
        lstrip_blocks=not is_plain_text,
        autoescape=".html." in file.name,
    )
    return environment.get_template(file.name).render(facts)
