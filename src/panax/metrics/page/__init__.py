"""Page builder for every page that Panax writes: blocks of content, and their conversion to HTML, Markdown
and SVG."""
