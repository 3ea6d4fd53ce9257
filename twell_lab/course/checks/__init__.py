"""What is asked of the answers to exercises: a file for each part of the course. Importing one enters its checks."""
