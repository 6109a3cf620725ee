"""A Tree-of-Thoughts travel planner on a local model: the end-to-end example.

`problem`, `generator`, `solver` and `checker` know no model; `graph` is the LangGraph graph;
`main` is the command line. Importing this package imports none of them.
"""
