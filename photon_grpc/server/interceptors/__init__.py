"""One concern per file, each a link of the chain that `Server` is given; `errors` is always the outermost."""
