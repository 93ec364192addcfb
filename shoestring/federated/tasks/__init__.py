"""Tasks that devices are given beside training: evaluate, tune, compare. Configurations go out, sums come back, records stay.

    task                      what is sent out: a configuration and attachments
    settings                  candidate settings, and grids of them
    device                    the device's side; `told_by_device` is its one way out
    aggregates, totals        what comes back: sums and histograms
    gather                    a question to many devices, and what they tell, added up
    release                   what of it the developer may see
    registry                  what was told before, about which devices
    estimates, student        means, standard errors, intervals of a difference
    evaluate, tune, compare   the tasks and their results; perform does a task; tables and text are for people

Paulik, Seigel, Mason et al. 2021, Federated Evaluation and Tuning for On-Device Personalization: System Design & Applications, arXiv
2102.08503.
"""
