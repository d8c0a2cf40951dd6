"""Rules of protovalidate: held by the grammar of answers where it can hold them, and checked."""
