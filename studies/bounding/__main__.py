from studies.bounding.study import main

main()
