"""JSON and YAML that people and other programs wrote: read strictly, with the place in each message."""
