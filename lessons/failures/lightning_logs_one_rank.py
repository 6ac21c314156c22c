"""A logged value of one rank alone

Run:    not here: it needs Lightning
Text:   PossibleUserWarning: It is recommended to use `self.log('val_loss', ..., sync_dist=True)` when
        logging on epoch level in distributed setting to accumulate the metric across devices.
Cause:  Each rank computes the value from its own part of the data, and what is logged, printed and used
        by checkpoint and early-stopping callbacks is not the mean over all ranks. Training itself is
        not affected.
Which:  A metric of torchmetrics, logged as an object (`self.log("accuracy", self.accuracy)`), adds up
        over the ranks by itself: there the warning is a false alarm.
Fix:    `self.log("val_loss", loss, sync_dist=True)` for values of an epoch, on all ranks and not within
        an `if rank == 0`. It is a collective: leave it out for values of each step. A mean of means is
        exact only if all ranks have as many samples (lesson 4); torchmetrics counts them.
Lesson: 4
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/20153
Source: https://github.com/roboflow/rf-detr/issues/909
"""
