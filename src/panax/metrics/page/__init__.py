"""One page builder for every page that Panax writes: blocks of content, and what makes HTML, Markdown and SVG of them."""
