"""Views: data in, text or HTML out.

A view of text is ``print_NAME(data, …, file=None)``, which prints on the console of ``views/terminal.py``; its twin
``format_NAME = giving_text(print_NAME)`` returns the text. A view of HTML is ``build_page(data, …)``, which returns the
text of a page framed by ``views/page/frame.py``; ``write_NAME(data, path, …)`` writes it with ``write_page`` and
returns the path. A view neither runs a model nor changes its data.
"""
