"""One run as a page: a self-contained HTML file of figures, timelines and what they rest on."""
