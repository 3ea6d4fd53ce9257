"""What the notebooks import: a folder or file for each subject, with its data, figures and widget; notebook, charts,
recorded and widgets serve several, and the checks of exercises are made of what verdicts has. Besides, `twell-lab
submit` judges as the capstone does, and the site and the tour's page show the widget of notebook 00."""
