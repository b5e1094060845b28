"""`python -m llmq_nb` is `llmq-nb`."""

from llmq_nb.cli import main

if __name__ == "__main__":
    main()
