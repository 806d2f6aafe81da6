"""What every program needs: errors, signals, child processes, atomic files and locks, terminal output. It never knows a
model, a task or an algorithm, and never imports torch."""
