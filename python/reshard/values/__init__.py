"""Values and their checks, which the other layers use. They know no file, no format and no rank."""
