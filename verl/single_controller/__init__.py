"""The name under which scripts know worker groups; the code lives in verl/parallel, verl/workers and verl/controller."""
